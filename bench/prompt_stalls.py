"""How long streams stand still while long prompts arrive, with and without a target of time for steps, and what the target costs.

    python bench/prompt_stalls.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

Writes bench/results/prompt_stalls.md. Both engines take turns in one run on the same cores.
"""

import asyncio
import itertools
import os
import random
import statistics
import time
from pathlib import Path

from shared import machine, model_asked_for
from starling_engine import AsyncEngine, EngineArgs, SamplingParams

RESULTS = Path(__file__).parent / "results" / "prompt_stalls.md"
STREAMS, SAID, NEW = 16, 64, 256
LONG, PROMPTS, ANSWER = 8000, 3, 16
TURNS = 2


class Client:
    """One engine's requests. `gaps` are the seconds between two tokens of its streams, `first` those to a long prompt's first
    token, `totals` those until a set of requests was done.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._rng = random.Random(0)
        self.gaps: list[float] = []
        self.first: list[float] = []
        self.totals: list[float] = []

    async def say(self, length: int, new: int, times: list[float]) -> None:
        """Writes down when each token came."""
        prompt = self._rng.choices(range(100, 3000), k=length)
        async for _ in self._engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)):
            times.append(time.perf_counter())

    async def stall(self) -> None:
        """One long prompt after the other, while streams go on all the time."""
        each: list[list[float]] = [[] for _ in range(STREAMS)]
        streams = [asyncio.create_task(self.say(SAID, LONG, times)) for times in each]
        while not all(each):  # noqa: ASYNC110 - tokens are no events
            await asyncio.sleep(0.1)
        began = time.perf_counter()
        for _ in range(PROMPTS):
            sent, times = time.perf_counter(), list[float]()
            await self.say(LONG, ANSWER, times)
            self.first.append(times[0] - sent)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for times in each:
            self.gaps += [after - before for before, after in itertools.pairwise(times) if after > began]

    async def touch(self) -> None:
        """Uses as much of the KV cache as anything after it, whose pages the system gives at first use."""
        await asyncio.gather(*(self.say(LONG + NEW, 1, []) for _ in range(PROMPTS + 1)))

    async def together(self) -> None:
        """The same streams and prompts, all sent at once."""
        began = time.perf_counter()
        streams = (self.say(SAID, NEW, []) for _ in range(STREAMS))
        await asyncio.gather(*streams, *(self.say(LONG, ANSWER, []) for _ in range(PROMPTS)))
        self.totals.append(time.perf_counter() - began)

    def row(self, name: str) -> str:
        gaps = sorted(self.gaps)
        p50, p99 = (1e3 * gaps[int(len(gaps) * share)] for share in (0.5, 0.99))
        figures = f"{p50:.0f} | {p99:.0f} | {1e3 * gaps[-1]:.0f} | {statistics.median(self.first):.1f}"
        return f"| {name} | {figures} | {statistics.median(self.totals):.1f} |"


async def in_turns(model: Path) -> dict[str, Client]:
    sizes = {"max_model_len": LONG + STREAMS * NEW, "kv_cache_memory_bytes": 5 << 30, "enable_prefix_caching": False}
    engines = {
        name: await AsyncEngine.start(EngineArgs(model=str(model), step_target_ms=target, show_progress=False, **sizes))
        for name, target in (("no target", 0), ("200 ms", 200))
    }
    clients = {name: Client(engine) for name, engine in engines.items()}
    for client in clients.values():
        await client.touch()
    for turn in range(TURNS):
        for client in list(clients.values())[:: -1 if turn % 2 else 1]:
            await client.stall()
            await client.together()
        print(*(client.row(name) for name, client in clients.items()), sep="\n", flush=True)
    for engine in engines.values():
        await engine.shutdown()
    return clients


def main() -> None:
    load = os.getloadavg()[0]
    clients = asyncio.run(in_turns(model_asked_for()))
    off, on = clients.values()
    ratios = [after / before for before, after in zip(off.totals, on.totals, strict=True)]
    pairs = ", ".join(f"{ratio:.1%}" for ratio in ratios)
    lines = [
        "# Streams beside long prompts",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}. Load before: {load:.1f}.",
        "",
        f"{STREAMS} streams decode while {PROMPTS} prompts of {LONG:,} tokens arrive one after the other; {TURNS} turns.",
        "",
        "| a step with decodes | median between two tokens (ms) | p99 (ms) | longest (ms) | a prompt's first token (s) | all (s) |",
        "|---|---:|---:|---:|---:|---:|",
        *(client.row(name) for name, client in clients.items()),
        "",
        f'"All" is the same set sent at once: {STREAMS} streams of {NEW} tokens and the {PROMPTS} prompts. With the target it',
        f"takes {statistics.median(ratios):.1%} of the time without (at most 105 %; pairs: {pairs}).",
    ]
    print("\n".join(lines))
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
