"""Measures two versions of the engine against each other, in turns a second apart, so that a noisy machine disturbs both alike.

    python bench/paired.py [--llama] [--minutes M] BEFORE AFTER [PART ...]

BEFORE and AFTER are checkouts. Each has an engine with the Qwen3-0.6B shape in bf16 (`--llama`: that shape as a Llama), in a
process of its own that is stopped while it is the other's turn. Prints the median and quartiles of AFTER's seconds over BEFORE's;
1.000 is no change. A part takes `--minutes` at most, and its start: on a slow machine it has fewer pairs.

decode-1, decode-8, decode-32   tokens of a batch
prefill                         first token of 1,024 tokens
cpu, files                      first token of 2,048 tokens that lie in the CPU tier, or in files
no-hits                         prompts that no tier has, with a CPU tier
preempted                       three requests of which one gives way and comes back
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from checkpoint import CACHE
from side import Side

ROUNDS = {"decode-1": 60, "decode-8": 40, "decode-32": 30, "prefill": 30, "cpu": 40, "files": 40, "no-hits": 24, "preempted": 12}
MODEL, LLAMA = CACHE / "qwen3-0.6b-shape", CACHE / "llama-0.6b-shape"
BYTES_PER_TOKEN = 28 * 2 * 8 * 128 * 2
PACKAGES = ("crds", "engine", "agent", "operator", "cli")
CACHED, PREEMPTED, SAID = 2048, 512, 32
FEWEST = 4
"""Pairs that a part has at least: fewer have no quartiles."""


# ---- one version: a child, which runs once for each line that it reads ----


def child(part: str, model: str) -> None:
    """Answers each line of its input with the seconds of a run; before it, prints those of the second one."""
    with measured(part, model) as run:
        run()
        began = time.perf_counter()
        run()
        print(time.perf_counter() - began, flush=True)
        for _ in sys.stdin:
            began = time.perf_counter()
            run()
            print(time.perf_counter() - began, flush=True)


@contextmanager
def measured(part: str, model: str) -> Iterator[Callable[[], object]]:
    """Starts an engine, and yields what to measure."""
    from starling_engine import LLM, SamplingParams

    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return rng.choices(range(100, 3000), k=count)

    def engine(tokens: int, **settings: Any) -> LLM:
        return LLM(model, num_threads=2, kv_cache_memory_bytes=tokens * BYTES_PER_TOKEN, show_progress=False, **settings)

    def asked(prompts: list[list[int]], count: int) -> None:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True), use_tqdm=False)

    with tempfile.TemporaryDirectory() as folder:
        if part.startswith("decode"):
            batch = int(part.removeprefix("decode-"))
            llm, prompts = engine(4096, max_model_len=1024, max_num_seqs=32), [words(16) for _ in range(batch)]
            run: Callable[[], object] = lambda: asked(prompts, max(8, 16 // batch))  # noqa: E731
        elif part == "prefill":
            llm = engine(4096, max_model_len=2048, enable_prefix_caching=False)
            run = lambda: asked([words(1024)], 1)  # noqa: E731
        elif part == "no-hits":
            llm = engine(4096, max_model_len=2048, max_num_seqs=8, kv_cpu_bytes=1 << 30)
            run = lambda: asked([words(128) for _ in range(4)], 8)  # noqa: E731
        elif part == "preempted":
            settings: dict[str, Any] = {"max_num_seqs": 2, "scheduling_policy": "priority", "kv_cpu_bytes": 1 << 30}
            llm = engine(2 * PREEMPTED + SAID * 3 // 2, max_model_len=PREEMPTED + 4 * SAID, **settings)
            params = SamplingParams(temperature=0.0, max_tokens=SAID, ignore_eos=True)
            run = lambda: llm._thread.run(preempted_once(llm.engine, [words(PREEMPTED) for _ in range(3)], params))  # noqa: E731
        else:
            tier: dict[str, Any] = {"kv_fs_path": folder, "kv_fs_bytes": 4 << 30, "kv_fs_direct": "off"}
            tier = {"kv_cpu_bytes": 2 << 30} if part == "cpu" else tier
            llm = engine(CACHED + 128, max_model_len=CACHED + 64, max_num_seqs=4, **tier)
            prefixes = [words(CACHED) for _ in range(2)]  # the device has room for one
            for prefix in prefixes:
                asked([prefix], 1)
                time.sleep(3.0)  # until it is written
            turns = cycle(prefixes)
            run = lambda: asked([next(turns) + words(8)], 1)  # noqa: E731
        with llm:
            yield run


async def preempted_once(engine: Any, prompts: list[list[int]], params: Any) -> None:
    """The first runs, the second makes it give way, and the third takes its blocks meanwhile."""
    first = engine.generate(prompts[0], params, priority=1)
    await anext(first)

    async def rest() -> None:
        async for _ in first:
            pass

    await asyncio.gather(rest(), *(engine.complete(prompt, params) for prompt in prompts[1:]))


# ---- both ----


def _side(checkout: Path, part: str, model: Path) -> Side:
    paths = os.pathsep.join(str(checkout.resolve() / name) for name in PACKAGES)
    return Side((sys.executable, __file__, "--child", part, str(model)), PYTHONPATH=paths)


def compare(before: Path, after: Path, part: str, model: Path, minutes: float) -> str:
    """Returns a line of the results."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with _side(before, part, model) as first, _side(after, part, model) as second:
        turns, end = [(first, seconds[0]), (second, seconds[1])], time.monotonic() + 60 * minutes
        for number in range(ROUNDS[part]):
            if number >= FEWEST and time.monotonic() > end:
                break
            for side, found in turns:
                found.append(side.ask())
            turns.reverse()
    old, new = seconds
    low, median, high = statistics.quantiles([b / a for a, b in zip(old, new, strict=True)], n=4)
    times = (f"{1e3 * statistics.median(each):.0f}" for each in seconds)
    return f"| {part} | {len(old)} | {' | '.join(times)} | {median:.3f} ({low:.3f}–{high:.3f}) |"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    import checkpoint
    from shared import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each part")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args()
    if unknown := set(options.parts) - ROUNDS.keys():
        parser.error(f"there is no part {', '.join(unknown)}")
    model = LLAMA if options.llama else MODEL
    (checkpoint.write_llama if options.llama else checkpoint.write)(model)
    print(f"{machine()}.\n")
    print("| part | pairs | before (ms) | after (ms) | after / before |\n|---|---:|---:|---:|---:|")
    for part in options.parts or ROUNDS:
        print(compare(options.before, options.after, part, model, options.minutes), flush=True)


if __name__ == "__main__":
    main()
