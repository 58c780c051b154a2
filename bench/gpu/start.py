"""From the start of a Python process to the first token, weights from files that are in the page cache."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu.files import write_weights
from bench.gpu.shapes import model_config, model_folder
from bench.gpu.table import Row, timed

ROOT = Path(__file__).parents[2]
FIRST_TOKEN = {"Llama-3-8B": 15.0}
GRAPHS = {"Qwen3-0.6B": 10.0}
"""Seconds that capturing may take."""


def rows(*, toy: bool) -> Iterator[Row]:
    for shape in ("Qwen3-0.6B", "Llama-3-8B"):
        with tempfile.TemporaryDirectory(prefix="starling-gpu-") as root:
            folder = model_folder(shape, toy=toy, root=Path(root))
            size = write_weights(folder, model_config(shape, toy=toy), room=shutil.disk_usage(root).free)
            torch.cuda.empty_cache()
            yield from _measure(shape, folder, size, toy=toy)


def _measure(shape: str, folder: Path, size: int, *, toy: bool) -> Iterator[Row]:
    what = f"{shape}, {size / 1e9:.1f} GB of files: start to first token"
    first, _ = _start(folder, toy=toy)
    yield Row(f"{what}, of a machine that has yet to compile the kernels", f"{first:.1f} s")
    took, phases = _start(folder, toy=toy)
    yield timed(what, f"{took:.1f} s", took, FIRST_TOKEN.get(shape))
    for phase, seconds in phases.items():
        yield timed(f"of that, {phase}", f"{seconds:.1f} s", seconds, GRAPHS.get(shape) if "graph" in phase else None)


def _start(folder: Path, *, toy: bool) -> tuple[float, dict[str, float]]:
    """Seconds in all, and of each phase of the worker's start by the engine's own account. Raises RuntimeError with its words."""
    command = [sys.executable, "-m", "bench.gpu.first_token", str(folder), *(["--toy"] if toy else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"no first token: {done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["phases"]
