"""What the KV cache's tiers save and cost: time to first token, throughput without hits, swap against recompute, and chats.

    python bench/kv_tiers.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

Writes bench/results/kv_tiers.md. A question's engines take turns in one run on the same cores.
"""

import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import checkpoint
from run import CACHE, machine
from starling_engine import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "kv_tiers.md"
THREADS = 2
PREFIX = 4096
TRIES = 5
PREEMPTED_TRIES = 9
"""Ways to preempt differ by less than two runs of the same do."""
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
    tiers = {"kv_fs_path": str(folder), "kv_fs_bytes": 8 * GIB, "kv_fs_direct": "off"}
    with start(model, kv_cpu_bytes=4 * GIB, **tiers) as engine:
        seconds(engine, [words(rng, 256)])
        computed = [seconds(engine, [prefix + words(rng, 8)])[0] for prefix in prefixes]
        fill(engine, rng)
        from_cpu = [found(engine, prefix + words(rng, 8)) for prefix in prefixes]
        settle(engine)
    with start(model, **tiers) as engine:
        fill(engine, rng)
        from_files = [found(engine, prefix + words(rng, 8)) for prefix in prefixes]
    miss, cpu, files = (statistics.median(each) for each in (computed, from_cpu, from_files))
    return [
        f"Time to first token of {PREFIX:,} cached tokens and 8 new ones, medians of {TRIES}:",
        "",
        "| computed | CPU tier (target 10 %) | filesystem, warm page cache (target 15 %) |",
        "|---:|---:|---:|",
        f"| {1e3 * miss:.0f} ms | {1e3 * cpu:.0f} ms, {cpu / miss:.1%} | {1e3 * files:.0f} ms, {files / miss:.1%} |",
    ]


def fill(engine: LLM, rng: random.Random) -> None:
    """The device forgets what it had, and all memory has been touched: the first time costs a virtual machine more than a copy."""
    seconds(engine, [words(rng, 4000) for _ in range(3)])
    settle(engine)


def settle(engine: LLM) -> None:
    """Until nothing is written any more."""
    before = -1
    while before != (now := sum(tier.stored_bytes_total for tier in engine.engine.stats.tiers.values())):
        before = now
        time.sleep(2.5)


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
    """Requests of one length in a cache that holds half of what they say, for each way to preempt."""
    ways = ("recompute", "swap", "auto")
    lines = ["| prompt | recompute (s) | swap (s) | auto (s) | auto to the better (target 1.05) |", "|---:|---:|---:|---:|---:|"]
    swap_wins: dict[int, bool] = {}
    for length in (128, 512, 2048):
        count, new = 4, 96
        # Room for their prompts, and for half of what they will say: some are preempted on the way.
        settings = {"max_model_len": length + new + 64, "max_num_seqs": count, "kv_cpu_bytes": 2 * GIB}
        settings["kv_cache_memory_bytes"] = (count * (length + new // 2)) * 28 * 2 * 8 * 128 * 2
        engines = {way: start(model, preempt=way, **settings) for way in ways}
        rng = random.Random(length)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for attempt in range(PREEMPTED_TRIES):
            prompts = [words(rng, length) for _ in range(count)]
            for way in (*ways[attempt % 3 :], *ways[: attempt % 3]):
                times[way].append(seconds(engines[way], prompts, new)[0])
        for engine in engines.values():
            engine.shutdown()
        took = {way: statistics.median(each[1:]) for way, each in times.items()}
        better = [min(pair) for pair in zip(times["recompute"], times["swap"], strict=True)]
        ratio = statistics.median(auto / best for auto, best in zip(times["auto"][1:], better[1:], strict=True))
        swap_wins[length] = took["swap"] <= took["recompute"]
        lines.append(f"| {length} | {' | '.join(f'{each:.2f}' for each in took.values())} | {ratio:.2f} |")
    return [*lines, "", crossover(swap_wins)]


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
    room = total // 4 * 28 * 2 * 8 * 128 * 2
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
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else CACHE / "qwen3-0.6b-shape"
    if len(sys.argv) < 2:
        checkpoint.write(model)
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
