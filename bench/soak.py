"""Whether a server's memory stays as it is: bad input, dropped streams and good requests, for as long as it is told.

    python bench/soak.py [--minutes 20]

Writes bench/results/soak.md. What is measured is no time, so other work on the machine does not matter.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx
from processes import family, free_port
from shared import machine

RESULTS = Path(__file__).parent / "results" / "soak.md"
MODEL = Path(__file__).parents[1] / "models" / "starling-pydoc"
KV_BYTES = "96MiB"
WARM_SECONDS, SAMPLE_SECONDS = 90.0, 5.0
CLIENTS = 6

NAME = "soak"
JSON_TYPE = {"content-type": "application/json"}


def body_of(**fields: object) -> bytes:
    return json.dumps({"model": NAME, **fields}).encode()


LONG_CHAT = [{"role": "user", "content": "word " * 1_600_000}]
BAD: list[tuple[str, str, bytes]] = [
    ("broken JSON", "/v1/chat/completions", body_of(messages=[])[:-2]),
    ("an unknown field", "/v1/completions", body_of(prompt="a", promt=1)),
    ("a wrong type", "/v1/completions", body_of(prompt={"a": 1})),
    ("no such model", "/v1/completions", body_of(model="other", prompt="a")),
    ("a prompt of 20 MB", "/v1/completions", body_of(prompt="word " * 4_000_000)),
    ("a chat of 8 MB", "/v1/chat/completions", body_of(messages=LONG_CHAT)),
    ("a body of 40 MB", "/v1/completions", b" " * 40_000_000),
    ("half a million values", "/v1/completions", body_of(prompt="a", stop=["x"] * 500_000)),
    ("two million values", "/v1/completions", body_of(prompt="a", stop=["x"] * 2_000_000)),
    ("a deep value", "/v1/completions", b"[" * 100_000),
    ("no such path", "/v1/nothing", b"{}"),
]


class Soak:
    """A server, its clients, and the memory of its processes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._rng = random.Random(0)
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.sent: Counter[str] = Counter()

    async def stream(self, name: str, characters: int, new: int, *, reads: int | None = None) -> None:
        """One streamed chat; `reads` chunks of it, then the connection is dropped."""
        self.sent[name] += 1
        text = "".join(self._rng.choices("abcdefghijklmnopqrstuvwxyz ", k=characters))
        body = body_of(messages=[{"role": "user", "content": text}], max_tokens=new, ignore_eos=True, stream=True)
        async with self._client.stream("POST", "/v1/chat/completions", content=body, headers=JSON_TYPE) as answer:
            seen = 0
            async for _ in answer.aiter_bytes():
                seen += 1
                if seen == reads:
                    return

    async def bad(self) -> None:
        name, path, body = self._rng.choice(BAD)
        self.sent[name] += 1
        with suppress(httpx.TransportError):  # a body that is refused before it is read ends its connection
            await self._client.post(path, content=body, headers=JSON_TYPE)

    async def half(self) -> None:
        """Half a header, a header that is too long, or half a body; then nothing more."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        name, sent = self._rng.choice(
            [
                ("half a header", head),
                ("a header of 64 KB", head + b"X: " + b"y" * 65_536 + b"\r\n\r\n"),
                ("half a body", head + b"Content-Length: 1000000\r\n\r\n" + body_of(prompt="x" * 10_000)),
            ]
        )
        self.sent[name] += 1
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(sent)
            await writer.drain()
            await asyncio.sleep(self._rng.random())
            writer.close()
            await writer.wait_closed()

    async def one(self) -> None:
        kind = self._rng.random()
        if kind < 0.3:
            await self.stream("streams read to their end", self._rng.randrange(20, 2000), self._rng.randrange(4, 64))
        elif kind < 0.6:
            await self.stream("streams dropped", self._rng.randrange(20, 2000), 512, reads=self._rng.randrange(1, 20))
        elif kind < 0.8:
            await self.half()
        else:
            await self.bad()

    async def fill(self) -> None:
        """Touches every page of the KV cache, and whatever else is made at a first use."""
        await asyncio.gather(*(self.stream("streams that fill the cache", 2500, 256) for _ in range(24)))

    async def run(self, seconds: float, each: Callable[[float], None]) -> None:
        """Clients go on for so long; `each` is called every few seconds with the time since the beginning."""
        began = time.monotonic()
        clients = [asyncio.create_task(_forever(self.one)) for _ in range(CLIENTS)]
        while (elapsed := time.monotonic() - began) < seconds:
            each(elapsed)
            await asyncio.sleep(SAMPLE_SECONDS)
            if any(client.done() for client in clients):
                break
        for client in clients:
            client.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def close(self) -> None:
        await self._client.aclose()


async def _forever(act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await act()


class Memory:
    """Resident bytes of a process and those that it started, by what each runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.samples: dict[str, list[tuple[float, int]]] = {}

    def sample(self, elapsed: float) -> None:
        for name, group in itertools.groupby(sorted((_name(pid), pid) for pid in family(self._pid)), key=lambda each: each[0]):
            total = sum(_resident(pid) for _, pid in group)
            self.samples.setdefault(name, []).append((elapsed, total))

    def row(self, name: str) -> str:
        """MiB at the beginning, in the middle and at the end: medians of a tenth of the time."""
        values = [value / 2**20 for _, value in self.samples[name]]
        tenth = max(1, len(values) // 10)
        places = (0, (len(values) - tenth) // 2, len(values) - tenth)
        first, middle, last = (sorted(values[at : at + tenth])[tenth // 2] for at in places)
        return f"| {name} | {first:.0f} | {middle:.0f} | {last:.0f} | {max(values):.0f} | {last - middle:+.1f} |"


def _name(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        modules = [word for word in words if word.startswith("starling_")]
        return modules[0] if modules else "starling serve" if "serve" in words else "others"
    return "others"


def _resident(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


async def soak(pid: int, port: int, seconds: float) -> tuple[Memory, Soak]:
    made, memory = Soak(port), Memory(pid)
    await _until_ready(port)
    await made.fill()
    await made.run(WARM_SECONDS, lambda _: None)
    made.sent.clear()
    await made.run(seconds, memory.sample)
    await made.close()
    return memory, made


async def _until_ready(port: int) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(120):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args().minutes
    port = free_port()
    command = [sys.executable, "-m", "starling_cli.main", "serve", str(MODEL), "--port", str(port), "--served-model-name", NAME]
    command += ["--kv-cache-memory-bytes", KV_BYTES]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        memory, made = asyncio.run(soak(server.pid, port, minutes * 60))
    finally:
        server.terminate()
        server.wait(60)
    sent = ", ".join(f"{count:,} {name}" for name, count in made.sent.most_common())
    lines = [
        "# Memory in a soak",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}.",
        "",
        f"{minutes:g} minutes after {WARM_SECONDS:g} s of warming up, {CLIENTS} clients, and a KV cache of {KV_BYTES} that was",
        f"touched before: {sum(made.sent.values()):,} requests ({sent}).",
        "Resident MiB, medians of a tenth of the time.",
        "",
        "| process | at the beginning | in the middle | at the end | highest | second half |",
        "|---|---:|---:|---:|---:|---:|",
        *(memory.row(name) for name in memory.samples),
    ]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
