"""What a router adds to the first tokens of many open streams, what short requests take of its processor, and what a pick takes.

The router has a core for itself; servers that compute nothing and the clients share another one, with the router and without.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from processes import Running, free_port, route, running
from router_clients import words
from starling_router.backend import Backend
from starling_router.index import PrefixIndex, longest_prefixes
from starling_router.picker import Picker, RouterPolicy

STUB = Path(__file__).parent / "router_stub.py"
STREAMS, TOKENS, RATE = 200, 60, 20.0
CLIENTS = 32
SECONDS, SHORT_SECONDS = 20.0, 4.0
ENDPOINTS, BLOCKS, BLOCK_TOKENS, PICKS = 1000, 100, 64, 200
PROMPT = words(random.Random(0), 60)


@dataclass
class Found:
    """Seconds to first tokens, direct and routed.

    busy    the router's processor time for a second of streams, in each round
    waited  seconds that it waited for its core then, because other processes had it
    short   short requests for a second of its processor time, in each round
    """

    direct: list[float] = field(default_factory=list)
    routed: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)


def measure(rounds: int, is_short: bool) -> Iterator[str]:
    seconds = SHORT_SECONDS if is_short else SECONDS
    with _started() as (stub, router):
        found = Found()
        for number in range(rounds):
            for side in (stub, router)[:: (1, -1)[number % 2]]:
                used, waited, began = router.cpu_seconds, router.waited_seconds, time.perf_counter()
                first = uvloop.run(streams(side.port, seconds))
                if side is stub:
                    found.direct += first
                    continue
                found.routed += first
                length = time.perf_counter() - began
                found.busy.append((router.cpu_seconds - used) / length)
                found.waited.append((router.waited_seconds - waited) / length)
            before = router.cpu_seconds
            count = uvloop.run(requests(router.port, seconds))
            found.short.append(count / (router.cpu_seconds - before))
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            yield text(found, picks())


@contextmanager
def _started() -> Iterator[tuple[Running, Running]]:
    """Starts stub and router, each with a core of its own where there are two; this process goes to the stub's."""
    mine = os.sched_getaffinity(0)
    cores = sorted(mine)
    with ExitStack() as closing:
        port = free_port()
        command = ["taskset", "-c", str(cores[-1]), sys.executable, str(STUB), str(port), str(TOKENS), str(RATE)]
        stub = closing.enter_context(running(command, port, "/backend"))
        port = free_port()
        router = closing.enter_context(running(["taskset", "-c", str(cores[0]), *route([stub.url], port)], port))
        closing.callback(os.sched_setaffinity, 0, mine)
        os.sched_setaffinity(0, cores[-1:])
        yield stub, router


def _request(**more: object) -> bytes:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": PROMPT}], **more}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


async def streams(port: int, seconds: float) -> list[float]:
    """Keeps STREAMS streams open, and returns the times to the first events of those that began once all were there."""
    request, first = _request(stream=True), list[float]()
    length = TOKENS / RATE
    begin = time.perf_counter() + length

    async def client(number: int) -> None:
        await asyncio.sleep(number / STREAMS * length)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < begin + seconds:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readuntil(b"data: ")
            if sent > begin:
                first.append(time.perf_counter() - sent)
            await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*map(client, range(STREAMS)))
    return first


async def requests(port: int, seconds: float) -> int:
    """Sends short requests without a pause on CLIENTS connections. Returns how many."""
    request, count = _request(), 0
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            writer.write(request)
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


def text(found: Found, picking: Sequence[float]) -> str:
    direct, routed = ((statistics.median(first), statistics.quantiles(first, n=100)[-1]) for first in (found.direct, found.routed))
    rows = (
        ("first token, ms, median", 1e3 * direct[0], 1e3 * routed[0], "3"),
        ("first token, ms, 99 %", 1e3 * direct[1], 1e3 * routed[1], "10"),
    )
    return "\n".join(
        [
            f"{STREAMS} open streams of {TOKENS} tokens, {RATE:g} a second, from a server that computes nothing.",
            "The router has one core, server and clients have another.",
            f"In turns, {len(found.direct):,} streams went direct, and {len(found.routed):,} by way of the router.",
            "",
            "| | direct | routed | added | goal |",
            "|---|---:|---:|---:|---:|",
            *(f"| {name} | {one:.2f} | {other:.2f} | {other - one:.2f} | {goal} |" for name, one, other, goal in rows),
            "",
            f"- The router used {statistics.median(found.busy):.0%} of its core for these streams, and waited "
            f"{statistics.median(found.waited):.0%} of the time for it, while other processes had it.",
            f"- Short requests by {CLIENTS} connections: {statistics.median(found.short):,.0f} for each second of its processor "
            "time (goal: 500).",
            f"- A pick among {ENDPOINTS:,} endpoints for a prompt of {BLOCKS} blocks: {1e3 * statistics.median(picking):.2f} ms of "
            "processor time (goal: 1).",
        ]
    )
