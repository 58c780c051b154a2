"""Chats that share system prompts, on four servers of which none has room for all of them, by way of one router after the other."""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import peer
from checkpoint import CACHE
from processes import free_port, route, running, serve
from router_clients import Chats, scraped, words
from router_goals import Figures, missed

SERVERS = 4
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2
"""Of SmolLM2-135M: layers, keys and values, heads, their size, bfloat16."""
KV_TOKENS = 4096
MODEL_TOKENS = 2048
ONE, ROUND_ROBIN, OWN = "one server", "round robin", "starling router"
NO_WEIGHTS = ("--prefix-weight", "0", "--load-weight", "0", "--session-weight", "0")
PEERS = (("sglang-router", "0.3.2", "sglang_router.launch_router"), ("vllm-router", "0.1.17", "vllm_router.launch_router"))


@dataclass(frozen=True)
class Workload:
    """Chats of several turns, so many `at_once`. Each begins with one of the system prompts, and clients think between its turns.

    Lengths are in words, that of an `answer` in tokens; `think` is the mean of the seconds.
    """

    systems: int = 12
    chats: int = 48
    at_once: int = 16
    turns: int = 5
    system_words: int = 480
    question_words: int = 40
    answer: int = 16
    think: float = 4.0

    def __str__(self) -> str:
        return (
            f"{self.chats} chats of {self.turns} turns, {self.at_once} at once, with {self.systems} system prompts of "
            f"{self.system_words} words. Questions have {self.question_words} words, answers {self.answer} tokens, and clients "
            f"think for {self.think:g} s in the mean."
        )


SHORT = Workload(systems=8, chats=12, at_once=6, turns=3, think=1.0)
WARM = Workload(chats=16, turns=2, think=0.1)


@dataclass(frozen=True)
class Turn:
    """A workload's seconds to first tokens, its tokens found in caches, and those that each server computed of its prompts."""

    first: list[float]
    hits: float
    computed: list[float]

    @property
    def balance(self) -> float:
        return max(self.computed) / statistics.mean(self.computed)


@dataclass
class Way:
    """A way to some servers, opened for each turn, and its turns."""

    name: str
    servers: Sequence[str]
    open: Callable[[], AbstractContextManager[str]]
    turns: list[Turn] = field(default_factory=list)

    def take_turn(self, workload: Workload, tag: str) -> Turn:
        """Sends a workload. Prompts of different tags have nothing in common, and equally many tokens."""
        with self.open() as url:
            before = _counts(self.servers)
            first = asyncio.run(_all_chats(url, workload, tag))
        asked, hits = zip(*((a - c, b - d) for (a, b), (c, d) in zip(_counts(self.servers), before, strict=True)), strict=True)
        return Turn(first, sum(hits), [tokens - hit for tokens, hit in zip(asked, hits, strict=True)])


def measure(model: Path, rounds: int, told: bool, is_short: bool, must_meet: bool) -> Iterator[str]:
    """Yields the section after each round. With `told` servers tell our router what they have cached.

    Ends the program with 1 behind the last one where goals must be met, and are not.
    """
    workload = SHORT if is_short else Workload()
    with _ways(model, told) as ways:
        if not is_short:
            for way in ways[:2]:  # all servers touch their memory
                way.take_turn(WARM, "000000")
        for number in range(rounds):
            for way in ways[:: (1, -1)[number % 2]]:
                way.turns.append(way.take_turn(workload, f"{random.randrange(10**6):06}"))
                print(f"round {number + 1} of {rounds}: {way.name}", file=sys.stderr, flush=True)
            figures = _figures(ways)
            yield _text(figures, workload, told, number + 1)
    peers = {name: each for name, each in figures.items() if name not in (ONE, ROUND_ROBIN, OWN)}
    if must_meet and (seen := missed(figures[OWN], peers)):
        sys.exit("missed: " + "; ".join(seen))


@contextmanager
def _ways(model: Path, told: bool) -> Iterator[list[Way]]:
    with ExitStack() as closing:
        token = Path(closing.enter_context(tempfile.TemporaryDirectory())) / "token"
        token.write_text("shared by router and servers")
        shared = ("--router-token-file", str(token)) if told else ()

        def start(tokens: int, threads: int) -> str:
            options = ["--max-model-len", str(MODEL_TOKENS), "--kv-cache-memory-bytes", str(tokens * TOKEN_BYTES), *shared]
            port = free_port()
            return closing.enter_context(running(serve(model, port, threads, *options), port)).url

        servers = [start(KV_TOKENS, 1) for _ in range(SERVERS)]
        one = start(SERVERS * KV_TOKENS, min(SERVERS, os.cpu_count() or 1))
        yield [
            Way(ONE, [one], lambda: nullcontext(one)),
            Way(ROUND_ROBIN, servers, lambda: _own(servers, *shared, *NO_WEIGHTS)),
            Way(OWN, servers, lambda: _own(servers, *shared)),
            *(Way(f"{name} {version}", servers, _opening(servers, name, version, module)) for name, version, module in PEERS),
        ]


@contextmanager
def _own(servers: Sequence[str], *options: str) -> Iterator[str]:
    port = free_port()
    with running(route(servers, port, *options), port) as router:
        yield router.url


def _opening(servers: Sequence[str], name: str, version: str, module: str) -> Callable[[], AbstractContextManager[str]]:
    """Returns what opens a router of others, with its cache-aware policy and all else as it comes."""

    @contextmanager
    def opening() -> Iterator[str]:
        port, interpreter = free_port(), str(peer.package(CACHE, name, version))
        command = [interpreter, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        with running([*command, "--policy", "cache_aware", "--worker-urls", *servers], port, "/readiness") as router:
            yield router.url

    return opening


def _counts(servers: Sequence[str]) -> list[tuple[float, float]]:
    """Returns prompt tokens and those found in the cache, of each server."""
    found = [scraped(url) for url in servers]
    return [(sum(each["vllm:prompt_tokens_total"].values()), sum(each["vllm:prefix_cache_hits_total"].values())) for each in found]


async def _all_chats(url: str, workload: Workload, tag: str) -> list[float]:
    """Returns the seconds to the first token of each answer."""
    left, first = [*range(workload.chats)], list[float]()
    async with Chats(url) as chats:

        async def client(number: int) -> None:
            await asyncio.sleep(random.Random(number).uniform(0, workload.think))
            while left:
                await _chat(chats, workload, left.pop(0), tag, first)

        await asyncio.gather(*map(client, range(workload.at_once)))
    return first


async def _chat(chats: Chats, workload: Workload, number: int, tag: str, first: list[float]) -> None:
    system, rng = number % workload.systems, random.Random(f"chat {number}")
    told = f"{tag} {words(random.Random(f'system {system}'), workload.system_words)}"
    messages = [{"role": "system", "content": told}]
    for _ in range(workload.turns):
        messages.append({"role": "user", "content": words(rng, workload.question_words)})
        reply = await chats.ask(messages, workload.answer)
        first.append(reply.first)
        messages.append({"role": "assistant", "content": reply.text})
        await asyncio.sleep(rng.expovariate(1 / workload.think))


def _figures(ways: Sequence[Way]) -> dict[str, Figures]:
    by_name = {way.name: way for way in ways}
    most = sum(turn.hits for turn in by_name[ONE].turns)
    slowest = statistics.median(_first(by_name[ROUND_ROBIN]))
    figures = {}
    for name, way in by_name.items():
        first = _first(way)
        figures[name] = Figures(
            hits=sum(turn.hits for turn in way.turns) / most,
            median=statistics.median(first),
            high=statistics.quantiles(first, n=10)[-1],
            to_round_robin=statistics.median(first) / slowest,
            balance=statistics.median(turn.balance for turn in way.turns),
        )
    return figures


def _text(figures: Mapping[str, Figures], workload: Workload, told: bool, rounds: int) -> str:
    lines = [
        *textwrap.wrap(
            f"{workload} SmolLM2-135M in Q4_1 on {SERVERS} servers of one thread, each with KV memory of {KV_TOKENS:,} tokens, "
            f"and on one with {SERVERS * KV_TOKENS:,}. "
            f"Servers tell our router {'what they have cached' if told else 'nothing of their caches'}. Rounds in "
            f"turns: {rounds}. Peers run with `--policy cache_aware`, and all else as it comes.",
            width=120,
        ),
        "Goals: 0.9 of the hit tokens, half of round robin's median, most computed tokens to the mean 1.3, no peer better.",
        "",
        "| | hit tokens to one server's | first token, ms, median | 90 % | median to round robin's | most computed to the mean |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, each in figures.items():
        lines.append(
            f"| {name} | {each.hits:.3f} | {1e3 * each.median:.0f} | {1e3 * each.high:.0f} "
            f"| {each.to_round_robin:.2f} | {each.balance:.2f} |"
        )
    return "\n".join(lines)


def _first(way: Way) -> list[float]:
    return [seconds for turn in way.turns for seconds in turn.first]
