"""What a change of an elastic group's size costs those that it serves: the pause at the commit, speed meanwhile, seconds by stage.

    python bench/elastic.py [MODEL] [--changes N] [--sources]

MODEL is a folder; by default a small Qwen3-MoE shape in bf16, random weights.

Streams run all the time, and every one must come to its end. A pause is the longest gap between two tokens of any stream around a
commit, less the ordinary one. Then, how fast experts come from each source alone (`--sources`: only that). Writes
bench/results/elastic.md.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import expert_sources
import moe_checkpoint
from checkpoint import CACHE
from shared import machine
from starling_engine import AsyncEngine, EngineArgs, SamplingParams
from starling_engine.core.client import CoreClient
from starling_engine.elastic.coordinator import SizeChange, Stage
from starling_engine.frontend.local_cores import LocalCores
from starling_engine.topology.epoch import ExpertLoads, merge_loaded

RESULTS = Path(__file__).parent / "results" / "elastic.md"
STREAMS, PROMPT, NEW = 4, 64, 400
QUIET_SECONDS = 1.5
"""Before and after each change."""
WAITING_SECONDS = 1.5
"""That joiners, which have loaded, are left waiting, to see what that alone costs."""
AFTER_SECONDS = 0.5
"""A gap that begins so long after the commit is still counted to it."""
IDLE_SECONDS = 5.0


class Streams:
    """One request after another in each; `times` holds when each token of each came."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.times: list[list[float]] = [[] for _ in range(STREAMS)]
        self.complete = self.broken = 0
        self.stopped = False
        self._tasks = [asyncio.create_task(self._run(engine, row)) for row in range(STREAMS)]

    async def _run(self, engine: AsyncEngine, row: int) -> None:
        number = row
        while not self.stopped:
            number += STREAMS
            prompt = [(number * 31 + i * 7) % 3000 + 100 for i in range(PROMPT)]
            self.times[row].append(float("nan"))  # no gap spans two requests
            got = 0
            try:
                async for item in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)):
                    now = time.perf_counter()
                    for output in item.outputs:
                        got += len(output.token_ids)
                        self.times[row] += [now] * len(output.token_ids)
            except Exception as error:  # noqa: BLE001 - counted, and shown
                print(f"broken: {error}", flush=True)
            self.complete, self.broken = self.complete + (got == NEW), self.broken + (got != NEW)

    async def stop(self) -> None:
        self.stopped = True
        await asyncio.gather(*self._tasks)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens of a stream, of the gaps that touch this time."""
        pairs = (pair for row in self.times for pair in itertools.pairwise(row))
        return [b - a for a, b in pairs if b >= begin and a <= end]

    def speed(self, begin: float, end: float) -> float:
        """Tokens a second."""
        return sum(begin <= when < end for row in self.times for when in row) / (end - begin)


@dataclass
class Patient:
    """The engine's own cores; joiners that have loaded wait a little before they are used."""

    own: LocalCores
    waiting: tuple[float, float] = (0.0, 0.0)

    async def launch(self, ranks: Sequence[int]) -> list[tuple[CoreClient, str]]:
        launched = await self.own.launch(ranks)
        began = time.perf_counter()
        await asyncio.sleep(WAITING_SECONDS)
        self.waiting = began, time.perf_counter()
        return launched

    async def release(self, clients: Sequence[CoreClient]) -> None:
        await self.own.release(clients)


@dataclass
class Change:
    grows: bool
    ordinary: float
    pause: float
    seconds: dict[str, float]
    speed: float
    """Tokens a second before it."""
    loaded: dict[str, ExpertLoads] = field(default_factory=dict)
    speed_loading: float = 0.0
    speed_waiting: float = 0.0


@dataclass
class Marks:
    at: dict[Stage, float] = field(default_factory=dict)

    def __call__(self, stage: Stage) -> None:
        self.at[stage] = time.perf_counter()


async def change(engine: AsyncEngine, cores: Patient, streams: Streams, target: int) -> Change:
    began, marks, before = time.perf_counter(), Marks(), engine.cores.membership.layout.data
    await asyncio.sleep(QUIET_SECONDS)
    quiet = time.perf_counter()
    resize = SizeChange(target, marks)
    assert engine.cores.coordinator is not None
    await engine.cores.coordinator.resize(resize)
    await asyncio.sleep(QUIET_SECONDS)
    ordinary = statistics.median(streams.gaps(began, quiet))
    commit, released = marks.at["committing"], marks.at["releasing"]
    made = Change(
        grows=target > before,
        ordinary=ordinary,
        pause=max(streams.gaps(commit, released + AFTER_SECONDS)) - ordinary,
        seconds=resize.seconds,
        loaded=resize.loaded,
        speed=streams.speed(began, quiet),
    )
    if made.grows:
        made.speed_loading = streams.speed(marks.at["waiting"], cores.waiting[0])
        made.speed_waiting = streams.speed(*cores.waiting)
        made.seconds["waiting"] = cores.waiting[0] - marks.at["waiting"]
    print(f"to {target}: pause {1e3 * made.pause:.0f} ms, {made}", flush=True)
    return made


def cpu(pids: list[int]) -> float:
    """Seconds that processes have used."""
    total = 0
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(stat[11]) + int(stat[12])
    return total / os.sysconf("SC_CLK_TCK")


def processes(core: int) -> list[int]:
    """An engine core and its ranks."""
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
    return [core] + [int(stat.split()[0]) for stat in stats if int(stat.rpartition(")")[2].split()[1]) == core]


async def idle(engine: AsyncEngine) -> float:
    """The share of a processor that a data parallel rank takes when there is nothing to do."""
    pids = [pid for core in engine.cores.processes for pid in processes(core.pid)]
    await asyncio.sleep(1.0)
    before = cpu(pids)
    await asyncio.sleep(IDLE_SECONDS)
    return (cpu(pids) - before) / IDLE_SECONDS / len(engine.cores.processes)


async def measure(model: Path, changes: int) -> list[str]:
    args = EngineArgs(
        model=str(model),
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        num_threads=1,
        enable_expert_parallel=True,
        enable_elastic_ep=True,
        enable_prefix_caching=False,
        show_progress=False,
        seed=0,
    )
    engine = await AsyncEngine.start(args)
    try:
        cores = Patient(engine.cores.local)
        assert engine.cores.coordinator is not None
        engine.cores.coordinator._pool = cores
        streams = Streams(engine)
        await asyncio.sleep(1.0)
        made = [await change(engine, cores, streams, 2 - number % 2) for number in range(changes)]
        await engine.scale(2)
        wide = [await change(engine, cores, streams, target) for target in (4, 2)]
        await streams.stop()
        idle_share = await idle(engine)
    finally:
        await engine.shutdown()
    return report(made, wide, streams, idle_share)


def report(made: list[Change], wide: list[Change], streams: Streams, idle_share: float) -> list[str]:
    grown, shrunk = [m for m in made if m.grows], [m for m in made if not m.grows]

    def ms(values: list[float]) -> str:
        return f"{1e3 * statistics.median(values):.0f} | {1e3 * max(values):.0f}"

    waiting = statistics.median(m.speed_waiting / m.speed for m in grown)
    loading = statistics.median(m.speed_loading / m.speed for m in grown)
    lines = [
        "| | median | most |",
        "|---|---:|---:|",
        f"| pause at the commit, {len(made)} changes (ms) | {ms([m.pause for m in made])} |",
        f"| of these {len(grown)} from 1 to 2 cores (ms) | {ms([m.pause for m in grown])} |",
        f"| and {len(shrunk)} from 2 to 1 (ms) | {ms([m.pause for m in shrunk])} |",
        f"| ordinary time between two tokens (ms) | {1e3 * statistics.median(m.ordinary for m in made):.1f} | |",
        "",
        f"- Streams complete: {streams.complete}; broken: {streams.broken}.",
        f"- Speed while joiners that have loaded wait: {waiting:.0%} of that before; while they start and load: {loading:.0%}.",
        f"- An idle data parallel rank, its engine core and its worker: {idle_share:.2%} of a processor.",
        "",
        "| seconds | start and load | prepare | commit | release | without start and load |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, each in (("1 to 2", grown), ("2 to 1", shrunk), ("2 to 4", wide[:1]), ("4 to 2", wide[1:])):
        stages = [statistics.median(m.seconds[s] for m in each) for s in ("waiting", "preparing", "committing", "releasing")]
        lines.append(f"| {name} | {' | '.join(f'{s:.2f}' for s in stages)} | {sum(stages[1:]):.2f} |")
    loaded = merge_loaded(m.loaded for m in [*made, *wide])
    parts = [f"{part.experts} from {source} at {part.rate / 1e6:.0f} MB/s" for source, part in loaded.items()]
    return [*lines, "", f"Experts that ranks loaded for all of these changes: {', '.join(parts)}."]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--sources", action="store_true")
    args = parser.parse_args()
    model = args.model or CACHE / "qwen3-moe-shape"
    if args.model is None:
        moe_checkpoint.write(model)
    load = os.getloadavg()[0]
    lines = ["", *expert_sources.measure(model)]
    if args.sources:
        print("\n".join(lines))
        return
    lines = asyncio.run(measure(model, args.changes)) + lines
    head = [
        "# Changes of an elastic group's size",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}. {STREAMS} streams of {PROMPT} tokens in and {NEW} out, one thread a rank;",
        f"one change after another. The load average before was {load:.1f}: others used the machine at the same time.",
        "",
    ]
    RESULTS.write_text("\n".join(head + lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
