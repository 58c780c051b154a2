"""What a store costs an engine that finds nothing in it: one that works, is full, is slow, hangs or is gone, against none.

    python bench/kv_store_serving.py [MODEL]     a folder; by default the Qwen3-0.6B shape in bf16, random weights

Writes bench/results/kv_store_serving.md. The engines take turns in one run on the same cores, with prompts that nobody has seen.
"""

import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_store import master
from kv_tiers import GIB, THREADS, seconds, settle, start, words
from shared import machine, model_asked_for
from starling_engine import LLM

RESULTS = Path(__file__).parent / "results" / "kv_store_serving.md"
TRIES = 12
SETTLED = {"calm": 1.2, "most": 10.0}
"""Seconds in which nothing was written any more, and for which at most that is waited for: the other engine has the cores alone."""
Process = subprocess.Popen[bytes]
Case = Callable[[Process], object]


@contextmanager
def slow(process: Process) -> Iterator[None]:
    """It works for 20 ms of each 300."""
    over = threading.Event()

    def halt() -> None:
        while not over.wait(0.02):
            process.send_signal(signal.SIGSTOP)
            over.wait(0.28)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def hangs(process: Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def works(process: Process) -> Iterator[None]:  # noqa: ARG001 - it is left alone
    yield


@contextmanager
def gone(process: Process) -> Iterator[None]:
    """For good."""
    process.kill()
    process.wait()
    yield


def throughput(engine: LLM, rng: random.Random) -> float:
    """Requests a second."""
    return 16 / seconds(engine, [words(rng, 256) for _ in range(16)], 32)[0]


def first_token(engine: LLM, rng: random.Random) -> float:
    """Seconds, of one request after another."""
    return statistics.median(seconds(engine, [words(rng, 512)])[0] for _ in range(3))


def written(engine: LLM) -> int:
    """Bytes, to the store."""
    tiers = engine.engine.stats.tiers
    return tiers["store"].stored_bytes_total if "store" in tiers else 0


def compared(off: LLM, on: LLM, rng: random.Random) -> str:
    """A row's cells: throughput and time to first token of `on`, in shares of `off`'s, and the share that was written meanwhile."""
    served: list[float] = []
    waited: list[float] = []
    at_once = in_all = 0
    for attempt in range(TRIES):
        for shares, measure in ((served, throughput), (waited, first_token)):
            measured, before = {}, written(on)
            for engine in (off, on) if attempt % 2 else (on, off):
                measured[engine] = measure(engine, rng)
                if engine is on:
                    at_once += written(on) - before
                    settle(on, **SETTLED)
            in_all += written(on) - before
            shares.append(measured[on] / measured[off])
    cells = [f"{statistics.median(each):.1%} ± {error(each):.1%}" for each in (served, waited)]
    return " | ".join([*cells, f"{at_once / in_all:.0%}" if in_all else ""])


def error(shares: list[float]) -> float:
    """The standard error of their median, from the range of their middle half, as of a normal distribution."""
    first, _, third = statistics.quantiles(shares, n=4)
    return math.sqrt(math.pi / 2 / len(shares)) * (third - first) / 1.349


def rows(model: Path, folder: Path) -> Iterator[str]:
    rng = random.Random(0)
    with start(model, max_model_len=2048) as off:
        with start(model, max_model_len=2048) as second:
            for engine in (off, second) * 2:
                throughput(engine, rng)
            yield f"| none: a second engine without | {compared(off, second, rng)} |"
        for segment, cases in (("64MiB", {"full": works}), ("1GiB", {"works": works, "slow": slow, "hangs": hangs, "gone": gone})):
            with master(folder, segment) as (url, process), start(model, max_model_len=2048, kv_cpu_bytes=GIB, kv_store=url) as on:
                for engine in (off, on) * 3:  # until all memory has been touched, and the small store is full
                    throughput(engine, rng)
                    settle(engine, **SETTLED)
                for name, case in cases.items():
                    with case(process):
                        yield f"| {name} | {compared(off, on, rng)} |"
                print(f"store of {segment}: {on.engine.stats.tiers['store']}", file=sys.stderr)


def main() -> None:
    model = model_asked_for()
    lines = [
        "# Serving with a store that has nothing of use",
        "",
        f"{time.strftime('%Y-%m-%d')}. {machine()}. {THREADS} threads; the store and its memory are on the same cores.",
        f"Medians of {TRIES} pairs in turns, and their standard errors. Throughput: 16 prompts of 256 tokens, 32 new.",
        "First token: prompts of 512 tokens, one at a time. What was put off is written before the other engine's turn.",
        "",
        "| store | throughput to that without | first token to that without | written while requests were served |",
        "|---|---:|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(model, Path(folder)):
            print(row, flush=True)
            lines.append(row)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
