"""Shared by the benchmarks: the machine, its instruction set, the model, and a side's figures in a process of its own."""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoint
from checkpoint import CACHE
from offline import BATCHES, START, rate
from side import Side
from starling_engine import native

BENCH = Path(__file__).parent


def model_asked_for() -> Path:
    """The folder that the command line names; without one, the Qwen3-0.6B shape with random weights."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    model = CACHE / "qwen3-0.6b-shape"
    checkpoint.write(model)
    return model


def offline_side(interpreter: Path | str, package: str, model: Path, threads: int) -> Side:
    command = [str(interpreter), str(BENCH / "offline.py"), package, str(model), str(threads)]
    return Side(command, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1")


def offline(interpreter: Path | str, package: str, model: Path, threads: int) -> dict[str, float]:
    with offline_side(interpreter, package, model, threads) as side:
        return {START: side.first, **rates(lambda batch, prompt, new: side.ask(f"{batch} {prompt} {new}"))}


def rates(best_seconds: Callable[[int, int, int], float]) -> dict[str, float]:
    """Returns figures from the seconds of the best try for a batch, tokens of a prompt, and new tokens."""
    return {name: rate(*numbers, best_seconds(*numbers)) for name, numbers in BATCHES.items()}


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: (min if "(s)" in name else max)(figures[name] for figures in rounds) for name in rounds[0]}


def machine() -> str:
    name = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?"
    )
    return f"{name}, {os.cpu_count()} cores, {kernels()}; Python {platform.python_version()}"


def results(name: str) -> Path:
    """Returns the file for results on this machine's instruction set."""
    return BENCH / "results" / f"{name}_{kernels()}.md"


def kernels() -> str:
    """Returns what computes here: the native kernels' instruction set."""
    native.load()
    return native.instruction_set_name()
