"""What the KV cache's tiers save and cost: time to first token, throughput without hits, swap against recompute, and chats.

    python bench/kv_tiers.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

Writes bench/results/kv_tiers.md. A question's engines take turns in one run on the same cores.
"""

import asyncio
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from shared import machine, model_asked_for
from starling_engine import LLM, AsyncEngine, EngineArgs, SamplingParams

RESULTS = Path(__file__).parent / "results" / "kv_tiers.md"
THREADS = 2
PREFIX = 4096
TRIES = 5
PREEMPTED = {128: 9, 512: 9, 2048: 5}
"""Tries by the prompts' length: what a preemption costs is the less of a run the shorter they are."""
SAID = 32
BYTES_PER_TOKEN = 28 * 2 * 8 * 128 * 2
GIB = 1 << 30
MIB = 1 << 20
Prompt = list[int]


def words(rng: random.Random, count: int) -> Prompt:
    return rng.choices(range(100, 3000), k=count)


def start(model: Path, **arguments: Any) -> LLM:
    settings = {"max_model_len": 8192, "kv_cache_memory_bytes": GIB, "num_threads": THREADS, "seed": 0, "show_progress": False}
    return LLM(str(model), **{**settings, **arguments})


def seconds(engine: LLM, prompts: list[Prompt], new: int = 1) -> tuple[float, int]:
    """How long all of them take, and how many tokens of them were found in a cache."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - began, sum(output.num_cached_tokens or 0 for output in outputs)


def first_token(model: Path, folder: Path) -> list[str]:
    """A prefix of PREFIX tokens that is computed, found in the CPU tier, and found in files of the page cache."""
    rng = random.Random(0)
    prefixes = [words(rng, PREFIX) for _ in range(TRIES)]
    tiers = {"kv_fs_path": str(folder), "kv_fs_bytes": 8 * GIB}
    with start(model, kv_cpu_bytes=4 * GIB, kv_fs_direct="off", **tiers) as engine:
        seconds(engine, [words(rng, 256)])
        computed = [seconds(engine, [prefix + words(rng, 8)])[0] for prefix in prefixes]
        fill(engine, rng)
        times = [[found(engine, prefix + words(rng, 8)) for prefix in prefixes]]
        settle(engine)
    for direct in ("off", "auto"):
        with start(model, kv_fs_direct=direct, **tiers) as engine:
            fill(engine, rng)
            times.append([found(engine, prefix + words(rng, 8)) for prefix in prefixes])
    miss = statistics.median(computed)
    hits = [f"{1e3 * hit:.0f} ms, {hit / miss:.1%}" for hit in map(statistics.median, times)]
    files = "filesystem, warm page cache (target 15 %)"
    return [
        f"Time to first token of {PREFIX:,} cached tokens and 8 new ones, medians of {TRIES}:",
        "",
        f"| computed | CPU tier (target 10 %) | {files} | the same, kv_fs_direct=auto |",
        "|---:|---:|---:|---:|",
        f"| {1e3 * miss:.0f} ms | {' | '.join(hits)} |",
    ]


def fill(engine: LLM, rng: random.Random) -> None:
    """The device forgets what it had, and all memory has been touched: the first time costs a virtual machine more than a copy."""
    seconds(engine, [words(rng, 4000) for _ in range(3)])
    settle(engine)


def settle(engine: LLM, calm: float = 2.5, most: float = math.inf) -> None:
    """Until nothing has been written for `calm` seconds, or `most` have passed."""
    end, before = time.monotonic() + most, -1
    while before != (now := sum(tier.stored_bytes_total for tier in engine.engine.stats.tiers.values())) and time.monotonic() < end:
        before = now
        time.sleep(calm)


def found(engine: LLM, prompt: Prompt) -> float:
    took, cached = seconds(engine, [prompt])
    assert cached >= PREFIX - 64, f"{cached} tokens were found: this measures something else"
    return took


def without_hits(model: Path, folder: Path) -> list[str]:
    """Prompts that nobody has seen, with tiers and without."""
    rng = random.Random(1)
    ratios = []
    tiers = {"kv_cpu_bytes": GIB, "kv_fs_path": str(folder), "kv_fs_bytes": 8 * GIB}

    def took(engine: LLM) -> float:
        return seconds(engine, [words(rng, 256) for _ in range(16)], 32)[0]

    with start(model, max_model_len=2048) as off, start(model, max_model_len=2048, **tiers) as on:
        for engine in (off, on) * 3:  # until all memory has been touched
            took(engine)
        for attempt in range(2 * TRIES):
            pair = {engine: took(engine) for engine in ((off, on) if attempt % 2 else (on, off))}
            ratios.append(pair[off] / pair[on])
            settle(on)
    listed = ", ".join(f"{ratio:.1%}" for ratio in ratios)
    return [
        f"Throughput with tiers and no hits (16 prompts of 256 tokens, 32 new): {statistics.median(ratios):.1%} of that without "
        f"(target 98 %; pairs: {listed})."
    ]


def preempted(model: Path) -> list[str]:
    """What a preemption costs whose blocks others take: without a CPU tier, and with one for each way to preempt that uses it."""
    ways: dict[str, dict[str, Any]] = {"recompute": {}} | {
        way: {"preempt": way, "kv_cpu_bytes": 2 * GIB} for way in ("swap", "auto")
    }
    lines = ["| prompt | recompute (s) | swap (s) | auto (s) | auto to the better (target 1.05) |", "|---:|---:|---:|---:|---:|"]
    swap_wins: dict[int, bool] = {}
    for length, tries in PREEMPTED.items():
        times = asyncio.run(in_turns(model, ways, length, tries))
        took = {way: statistics.median(each) for way, each in times.items()}
        swap_wins[length] = took["swap"] <= took["recompute"]
        better = times["swap" if swap_wins[length] else "recompute"]
        ratio = statistics.median(auto / best for auto, best in zip(times["auto"], better, strict=True))
        lines.append(f"| {length} | {' | '.join(f'{each:.2f}' for each in took.values())} | {ratio:.2f} |")
    return [*lines, "", crossover(swap_wins)]


async def in_turns(model: Path, ways: dict[str, dict[str, Any]], length: int, tries: int) -> dict[str, list[float]]:
    """Seconds of each try, by way. The cache has room for two prompts, and for three quarters of what the two say."""
    settings: dict[str, Any] = {"max_model_len": length + 2 * SAID, "max_num_seqs": 2, "scheduling_policy": "priority"}
    settings |= {"kv_cache_memory_bytes": (2 * length + SAID * 3 // 2) * BYTES_PER_TOKEN, "num_threads": THREADS, "seed": 0}
    engines = {way: await AsyncEngine.start(EngineArgs(model=str(model), **settings, **more)) for way, more in ways.items()}
    rng = random.Random(length)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for attempt in range(tries + 1):
        prompts = [words(rng, length) for _ in range(3)]
        order = list(ways)
        for way in order[attempt % len(order) :] + order[: attempt % len(order)]:
            took = await preempted_once(engines[way], prompts)
            if attempt:  # until all memory has been touched
                times[way].append(took)
    for engine in engines.values():
        await engine.shutdown()
    return times


async def preempted_once(engine: AsyncEngine, prompts: list[Prompt]) -> float:
    """Seconds of three requests: the first runs, the second makes it give way, and the third takes its blocks meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=SAID, ignore_eos=True)
    before, began = engine.stats.preemptions_total, time.perf_counter()
    first = engine.generate(prompts[0], params, priority=1)
    await anext(first)
    others = [engine.complete(prompt, params) for prompt in prompts[1:]]
    await asyncio.gather(finish(first), *others)
    took = time.perf_counter() - began
    assert engine.stats.preemptions_total > before, "nobody was preempted: this measures something else"
    return took


async def finish(outputs: AsyncIterator[Any]) -> None:
    async for _ in outputs:
        pass


def crossover(swap_wins: dict[int, bool]) -> str:
    """From which length on swapping is the faster one at all that are longer; `swap_wins` by length, ascending."""
    lengths = list(swap_wins)
    loses = [index for index, length in enumerate(lengths) if not swap_wins[length]]
    if not loses:
        return f"Swapping is the faster one from {lengths[0]} tokens on, the shortest that was tried."
    if len(loses) == len(lengths):
        return "Recomputing is the faster one at every length that was tried."
    if loses[-1] == len(lengths) - 1:
        return "There is no clear crossover."
    return f"Swapping is the faster one from {lengths[loses[-1] + 1]} tokens on."


def chats(model: Path) -> list[str]:
    """64 conversations of several turns with one system prompt; all of them together are four times the device's cache."""
    system, turn, said, turns, conversations = 256, 64, 16, 8, 64
    total = system + turns * (turn + said) * conversations
    room = total // 4 * BYTES_PER_TOKEN
    took = {}
    for name, tiers in (("device only", {}), ("CPU tier", {"kv_cpu_bytes": 5 * room})):
        rng = random.Random(2)
        history = [words(rng, system)] * conversations
        with start(model, max_model_len=2048, kv_cache_memory_bytes=room, max_num_seqs=16, **tiers) as engine:
            seconds(engine, [words(rng, 256)])
            began = time.perf_counter()
            for _ in range(turns):
                history = [past + words(rng, turn) for past in history]
                seconds(engine, history, said)
            took[name] = time.perf_counter() - began
    ratio = took["device only"] / took["CPU tier"]
    times = ", ".join(f"{name} {each:.1f} s" for name, each in took.items())
    many = f"{conversations} conversations of {turns} turns, 4 times the device's cache"
    return [f"{many}: {times}: {ratio:.2f} times the throughput (target 2)."]


def main() -> None:
    model = model_asked_for()
    lines = ["# Tiers of the KV cache", "", f"{time.strftime('%Y-%m-%d')}. {machine()}. {THREADS} threads."]
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    try:
        for report in (first_token(model, folder / "first"), without_hits(model, folder / "none"), preempted(model), chats(model)):
            print("\n".join(report), flush=True)
            lines += ["", *report]
    finally:
        shutil.rmtree(folder)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
