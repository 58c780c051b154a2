"""The price of a busy process on the engine's cores for its streams, with as many threads as there are cores and with one.

    python bench/neighbours.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

Writes bench/results/neighbours.md. Engines take turns in one run; each time is the median of its turns.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from shared import machine, model_asked_for
from starling_engine import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results" / "neighbours.md"
BATCHES = {1: 32, 16: 8}
"""Tokens of each stream that are timed, by the number of streams."""
TURNS = 5
BUSY = "while True: pass"


def decode_ms(engine: LLM, batch: int, new: int) -> float:
    """Milliseconds between two tokens of `batch` streams: what `new` more of them take."""
    prompts = [{"prompt_token_ids": random.choices(range(100, 3000), k=32)} for _ in range(batch)]
    times = []
    for tokens in (1, new + 1):
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        times.append(time.perf_counter() - began)
    return 1e3 * (times[1] - times[0]) / new


def beside(engines: dict[int, LLM], neighbours: int) -> dict[tuple[int, int], float]:
    """The medians, by threads and streams."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(neighbours)]
    times: dict[tuple[int, int], list[float]] = {(threads, batch): [] for threads in engines for batch in BATCHES}
    try:
        for _ in range(TURNS):
            for (threads, batch), each in times.items():
                each.append(decode_ms(engines[threads], batch, BATCHES[batch]))
    finally:
        for process in busy:
            process.kill()
    return {case: statistics.median(each) for case, each in times.items()}


def main() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    sizes = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30, "enable_prefix_caching": False}
    engines = {threads: LLM(str(model_asked_for()), num_threads=threads, **sizes) for threads in sorted({cores, 1}, reverse=True)}
    for engine in engines.values():
        decode_ms(engine, 16, 4)  # until its memory has been touched
    lines = [
        "# Decoding beside other processes",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}. Load before: {load:.1f}.",
        "",
        "Milliseconds between two tokens of each stream.",
        "",
        "| busy processes | " + " | ".join(f"{t} threads, {b} streams" for t in engines for b in BATCHES) + " |",
        "|---|" + "---:|" * (len(engines) * len(BATCHES)),
    ]
    for neighbours in (0, 1, cores):
        times = beside(engines, neighbours)
        lines.append(f"| {neighbours} | " + " | ".join(f"{times[t, b]:.1f}" for t in engines for b in BATCHES) + " |")
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
