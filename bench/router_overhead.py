"""What a router adds to the first tokens of many open streams, what short requests take of its processor, and what a pick takes.

The router has a core for itself and the process that renders chats for it. Servers that compute nothing and the clients share
another one, with the router and without. It goes by texts, as without a token, and by blocks, as on Kubernetes.
"""

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from processes import Running, cpu_seconds, family, free_port, route, running
from router_clients import scraped, words
from starling_router.backend import Backend
from starling_router.index import PrefixIndex, longest_prefixes
from starling_router.picker import Picker, RouterPolicy

STUB = Path(__file__).parent / "router_stub.py"
MODEL = Path(__file__).parents[1] / "models" / "starling-pydoc"
"""Only its tokenizer and its template are used."""
STREAMS, TOKENS, RATE = 200, 60, 20.0
CLIENTS, PROMPTS = 32, 64
SECONDS, SHORT_SECONDS = 20.0, 4.0
ENDPOINTS, BLOCKS, BLOCK_TOKENS, PICKS = 1000, 100, 64, 200


@dataclass(frozen=True)
class Way:
    """A way to look for prompts of so many words: by their texts, or by blocks that a server with its token tells."""

    name: str
    words: int
    is_exact: bool


WAYS = (Way("texts", 60, False), Way("blocks", 60, True), Way("blocks, long prompts", 430, True))


@dataclass
class Found:
    """Seconds to first tokens, direct and routed.

    busy    the router's processor time for a second of streams, in each round
    waited  seconds that it waited for its core then, because other processes had it
    short   short requests for a second of its processor time, in each round
    tokens  of a prompt in the mean, as the router counts them
    """

    direct: list[float] = field(default_factory=list)
    routed: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    tokens: float = 0.0


def measure(rounds: int, seconds: float | None, is_short: bool) -> Iterator[str]:
    seconds = seconds or (SHORT_SECONDS if is_short else SECONDS)
    found = {way: Found() for way in WAYS}
    for number in range(rounds):
        for way in WAYS:
            with _started(way) as (stub, router):
                _measure(way, stub, router, seconds, found[way], routed_first=number % 2 == 1)
            print(f"round {number + 1} of {rounds}: {way.name}", file=sys.stderr, flush=True)
        yield text(found, picks())


def _measure(way: Way, stub: Running, router: Running, seconds: float, found: Found, *, routed_first: bool) -> None:
    counts = _counts(router)
    for side in (router, stub) if routed_first else (stub, router):
        used, waited, began = _used(router), router.waited_seconds, time.perf_counter()
        first = uvloop.run(streams(side.port, way, seconds))
        if side is stub:
            found.direct += first
            continue
        found.routed += first
        length = time.perf_counter() - began
        found.busy.append((_used(router) - used) / length)
        found.waited.append((router.waited_seconds - waited) / length)
    before = _used(router)
    count = uvloop.run(requests(router.port, way, min(seconds, SHORT_SECONDS)))
    found.short.append(count / (_used(router) - before))
    picked, exact, tokens = (now - then for now, then in zip(_counts(router), counts, strict=True))
    if exact != (picked if way.is_exact else 0):
        sys.exit(f"{way.name}: {exact:g} of {picked:g} prompts were looked for by blocks")
    found.tokens = tokens / picked


def _used(router: Running) -> float:
    """Returns the processor time of the router and of what renders chats for it."""
    return sum(map(cpu_seconds, family(router.pid)))


def _counts(router: Running) -> list[float]:
    """Returns how many prompts it has sent on, those that went by blocks, and the tokens of all."""
    counts = scraped(router.url)
    return [sum(counts[f"starling:router_{name}_total"].values()) for name in ("picks", "exact_prompts", "prompt_tokens")]


@contextmanager
def _started(way: Way) -> Iterator[tuple[Running, Running]]:
    """Starts stub and router, each with a core of its own where there are two; this process goes to the stub's."""
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)
    with ExitStack() as closing:
        files, options = list[str](), list[str]()
        if way.is_exact:
            token = Path(closing.enter_context(tempfile.TemporaryDirectory())) / "token"
            token.write_text("of the benchmark")
            files, options = [str(token), str(MODEL)], ["--router-token-file", str(token)]
        port = free_port()
        command = ["taskset", "-c", str(cores[-1]), sys.executable, str(STUB), str(port), str(TOKENS), str(RATE), *files]
        stub = closing.enter_context(running(command, port, "/backend"))
        port = free_port()
        router = closing.enter_context(running(["taskset", "-c", str(cores[0]), *route([stub.url], port, *options)], port))
        if way.is_exact:
            _wait_for_blocks(router, way)
        closing.callback(os.sched_setaffinity, 0, mine)
        os.sched_setaffinity(0, cores[-1:])
        yield stub, router


def _wait_for_blocks(router: Running, way: Way) -> None:
    """Sends requests until the router has the tokenizer and knows what is cached."""
    for _ in range(100):
        uvloop.run(requests(router.port, way, 0.1))
        if _counts(router)[1]:
            return
    sys.exit("the router does not look for prompts by blocks")


def _requests(way: Way, **more: object) -> Iterator[bytes]:
    """Gives requests without an end, of different prompts."""
    rng, made = random.Random(0), []
    for _ in range(PROMPTS):
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": words(rng, way.words)}], **more}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        made.append(head % len(body) + body)
    return itertools.cycle(made)


async def streams(port: int, way: Way, seconds: float) -> list[float]:
    """Keeps STREAMS streams open, and returns the times to the first events of those that began once all were there."""
    given, first = _requests(way, stream=True), list[float]()
    length = TOKENS / RATE
    begin = time.perf_counter() + length

    async def client(number: int) -> None:
        await asyncio.sleep(number / STREAMS * length)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < begin + seconds:
            writer.write(next(given))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readuntil(b"data: ")
            if sent > begin:
                first.append(time.perf_counter() - sent)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*map(client, range(STREAMS)))
    if not first:
        sys.exit(f"no stream began in {seconds:g} s: give more --seconds, on a machine where nobody stops these processes")
    return first


async def requests(port: int, way: Way, seconds: float) -> int:
    """Sends requests with short answers without a pause on CLIENTS connections. Returns how many."""
    given, count = _requests(way), 0
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            writer.write(next(given))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
            count += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return count


def picks() -> list[float]:
    """Returns the seconds of processor time of picks for a prompt of which each endpoint has a prefix."""
    index, prompt = PrefixIndex(), list(range(BLOCKS))
    for number in range(ENDPOINTS):
        index.add(number, prompt[: 1 + number % BLOCKS])
    backends = [Backend(f"pod-{number}", "", number, ready=True) for number in range(ENDPOINTS)]
    picker, taken = Picker(RouterPolicy()), []
    for _ in range(PICKS):
        began = time.process_time()
        cached = {number: count * BLOCK_TOKENS for number, count in longest_prefixes((index,), prompt)}
        picker.pick(backends, BLOCKS * BLOCK_TOKENS, cached, "session")
        taken.append(time.process_time() - began)
    return taken


def text(found: Mapping[Way, Found], picking: Sequence[float]) -> str:
    direct, routed = (sum(len(getattr(of, side)) for of in found.values()) for side in ("direct", "routed"))
    waited = max(statistics.median(of.waited) for of in found.values())
    columns = ("tokens", "direct, ms", "added", "99 %: direct", "added", "core for the streams", "requests a second of a core")
    return "\n".join(
        [
            f"{STREAMS} open streams of {TOKENS} tokens, {RATE:g} a second, from a server that computes nothing: times to first",
            f"tokens. Then requests with short answers by {CLIENTS} connections, for each second of the router's processor time.",
            "The router has one core, server and clients have another. By texts is without a token. By blocks, as on Kubernetes,",
            "it renders and tokenizes prompts, hears what comes and goes in a full cache, and reads the notes in streams.",
            f"In turns, {direct:,} streams went direct, and {routed:,} by way of the router.",
            "",
            f"| prompts by | {' | '.join(columns)} |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *(_row(way, of) for way, of in found.items()),
            "| goal | | | 3 | | 10 | | 500 |",
            "",
            f"- The router waited at most {waited:.0%} of the time for its core, while other processes had it.",
            f"- A pick among {ENDPOINTS:,} endpoints for a prompt of {BLOCKS} blocks: {1e3 * statistics.median(picking):.2f} ms of "
            "processor time (goal: 1).",
        ]
    )


def _row(way: Way, found: Found) -> str:
    middle, tail = ([1e3 * figure(each) for each in (found.direct, found.routed)] for figure in (statistics.median, _last))
    first = " | ".join(f"{direct:.2f} | {routed - direct:.2f}" for direct, routed in (middle, tail))
    used = f"{statistics.median(found.busy):.0%} | {statistics.median(found.short):,.0f}"
    return f"| {way.name} | {found.tokens:.0f} | {first} | {used} |"


def _last(first: Sequence[float]) -> float:
    return statistics.quantiles(first, n=100)[-1]
