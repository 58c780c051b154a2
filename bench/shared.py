"""Shared by the benchmarks: the machine, its instruction set, the model, and a side's figures in a process of its own."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import checkpoint
from checkpoint import CACHE
from starling_engine import native

BENCH = Path(__file__).parent


def model_asked_for() -> Path:
    """The folder that the command line names; without one, the Qwen3-0.6B shape with random weights."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    model = CACHE / "qwen3-0.6b-shape"
    checkpoint.write(model)
    return model


def offline(interpreter: Path | str, package: str, model: Path, threads: int) -> dict[str, float]:
    command = [str(interpreter), str(BENCH / "offline.py"), package, str(model), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{package} gave no figures:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(lines[-1])
    return figures


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
