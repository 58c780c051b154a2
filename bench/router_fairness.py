"""Tenants on two servers: what one waits for its first tokens beside another one that floods, and how equal ones share."""

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import free_port, route, running, serve
from router_clients import Chats, scraped, words

SERVERS = 2
OPTIONS = ("--max-model-len", "4096", "--kv-cache-memory-bytes", "512MiB")
TOKENS = "starling:router_tenant_tokens_total"


@dataclass(frozen=True)
class Tenant:
    """Asks with so many clients, each of which asks again as soon as it has its answer. Prompts are in words, answers in tokens."""

    name: str
    clients: int
    prompt: int
    answer: int


LIGHT = "light"
LIGHT_PROMPTS, LIGHT_ANSWER = (400, 1500), 16
"""Words of its prompts, which take turns, and tokens of its answers."""
FLOOD = Tenant("flood", 64, 300, 32)
EQUAL = (Tenant("a", 24, 300, 16), Tenant("b", 32, 100, 64), Tenant("c", 48, 600, 8), Tenant("d", 64, 150, 32))
PAUSE = 1.0
"""Mean seconds between an answer to the light tenant and its next request."""


@dataclass(frozen=True)
class Lengths:
    """Sizes of a run: requests of each length that the light tenant sends, and tokens of a flood before and while it is looked at.

    They are no seconds, for servers whose cores are others', too, give few tokens in any time.
    """

    requests: int = 20
    before: int = 10_000
    tokens: int = 50_000


SHORT = Lengths(3, 1000, 4000)


def measure(model: Path, rounds: int, is_short: bool) -> Iterator[str]:
    """Yields the section after each round."""
    lengths = SHORT if is_short else Lengths()
    alone, beside, shares = list[list[float]](), list[list[float]](), list[list[float]]()
    with _routed(model) as url:
        for number in range(rounds):
            alone += asyncio.run(_light(url, lengths, ()))
            beside += asyncio.run(_light(url, lengths, (FLOOD,)))
            shares.append(asyncio.run(_equal(url, lengths)))
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            yield _text(alone, beside, shares)


@contextmanager
def _routed(model: Path) -> Iterator[str]:
    """Yields the URL of a router of all tenants, whose keys are their names."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        (folder / "keys").mkdir()
        names = [LIGHT, *(tenant.name for tenant in (FLOOD, *EQUAL))]
        (folder / "tenants.yaml").write_text("".join(f"- name: {name}\n" for name in names))
        for name in names:
            (folder / "keys" / name).write_text(name)
        (folder / "token").write_text("shared by router and servers")
        shared = ("--router-token-file", str(folder / "token"))
        ports = [free_port() for _ in range(SERVERS)]
        urls = [closing.enter_context(running(serve(model, port, 1, *OPTIONS, *shared), port)).url for port in ports]
        port = free_port()
        options = ("--tenants-file", str(folder / "tenants.yaml"), "--hold-seconds", "600", *shared)
        yield closing.enter_context(running(route(urls, port, *options), port)).url


async def _light(url: str, lengths: Lengths, others: Sequence[Tenant]) -> list[list[float]]:
    """Returns the seconds to first tokens of the light tenant beside others, those of its prompts for each time."""
    rng, first = random.Random(), list[list[float]]()
    async with _flooded(url, others), Chats(url, LIGHT) as chats:
        if others:
            await _given(url, others, lengths.before)
        for _ in range(lengths.requests):
            first.append([])
            for length in LIGHT_PROMPTS:
                first[-1].append((await chats.ask(_prompt(length, rng), LIGHT_ANSWER)).first)
                await asyncio.sleep(rng.expovariate(1 / PAUSE))
    return first


async def _equal(url: str, lengths: Lengths) -> list[float]:
    """Returns the tokens that each of the equal tenants got."""
    async with _flooded(url, EQUAL):
        await _given(url, EQUAL, lengths.before)
        return await _given(url, EQUAL, lengths.tokens)


async def _given(url: str, tenants: Sequence[Tenant], tokens: int) -> list[float]:
    """Waits until tenants together have got so many tokens more. Returns how many each has."""
    before = await asyncio.to_thread(_got, url, tenants)
    more = [0.0]
    while sum(more) < tokens:
        await asyncio.sleep(1)
        more = [now - then for then, now in zip(before, await asyncio.to_thread(_got, url, tenants), strict=True)]
    return more


def _got(url: str, tenants: Sequence[Tenant]) -> list[float]:
    """Returns the tokens of prompts and answers that each tenant has got up to now."""
    found = scraped(url)[TOKENS]
    return [sum(count for labels, count in found.items() if f'tenant="{tenant.name}"' in labels) for tenant in tenants]


@asynccontextmanager
async def _flooded(url: str, tenants: Sequence[Tenant]) -> AsyncIterator[None]:
    clients = [asyncio.create_task(_client(url, tenant)) for tenant in tenants for _ in range(tenant.clients)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
    for each in ended:
        if not isinstance(each, asyncio.CancelledError):
            raise SystemExit(f"a client of a flood ended early: {each!r}")


async def _client(url: str, tenant: Tenant) -> None:
    rng = random.Random()
    async with Chats(url, tenant.name) as chats:
        while True:
            await chats.ask(_prompt(tenant.prompt, rng), tenant.answer)


def _prompt(length: int, rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": words(rng, length)}]


def _jain(shares: Sequence[float]) -> float:
    """Returns Jain's index: 1 where all are equal, 1 / n where one has all."""
    return float(sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)))


def _text(alone: Sequence[Sequence[float]], beside: Sequence[Sequence[float]], shares: Sequence[Sequence[float]]) -> str:
    rows = []
    for length, first, later in zip(LIGHT_PROMPTS, zip(*alone, strict=True), zip(*beside, strict=True), strict=True):
        (median, high), (late, latest) = (
            (statistics.median(each), statistics.quantiles(each, n=10)[-1]) for each in (first, later)
        )
        times = " | ".join(f"{1e3 * seconds:.0f}" for seconds in (median, high, late, latest))
        rows.append(f"| {length:,} words | {times} | {late / median:.2f} |")
    indexes = [_jain(each) for each in shares]
    equal = [
        f"| {tenant.name} | {tenant.clients} | {tenant.prompt} | {tenant.answer} | {sum(each[i] for each in shares):,.0f} |"
        for i, tenant in enumerate(EQUAL)
    ]
    return "\n".join(
        [
            f"SmolLM2-135M in Q4_1 on {SERVERS} servers of one thread. A light tenant sends one request at a time: alone, and",
            f"beside {FLOOD.clients} clients of another one (prompts of {FLOOD.prompt} words, answers of {FLOOD.answer} tokens). "
            f"{len(alone)} requests of each length.",
            "",
            "| first token, ms, behind a prompt of | alone, median | 90 % | beside a flood, median | 90 % | to alone (goal: 1.5) |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            "Four equal tenants that ask all the time: Jain's index of their tokens is "
            f"{statistics.median(indexes):.3f} (goal: 0.95).",
            "",
            "| tenant | clients | words of a prompt | tokens of an answer | tokens that it got |",
            "|---|---:|---:|---:|---:|",
            *equal,
        ]
    )
