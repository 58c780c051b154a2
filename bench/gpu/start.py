"""From the start of a Python process to the first token, weights from files that are in the page cache."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.files import write_weights
from bench.gpu.shapes import model_config, model_folder
from bench.gpu.table import Row

ROOT = Path(__file__).parents[2]
GOALS = {"Llama-3-8B": 15.0}


def rows(*, toy: bool) -> Iterator[Row]:
    for shape in ("Qwen3-0.6B", "Llama-3-8B"):
        with tempfile.TemporaryDirectory(prefix="starling-gpu-") as root:
            folder = model_folder(shape, toy=toy, root=Path(root))
            size = write_weights(folder, model_config(shape, toy=toy), room=shutil.disk_usage(root).free)
            yield from _measure(shape, folder, size, toy=toy)


def _measure(shape: str, folder: Path, size: int, *, toy: bool) -> Iterator[Row]:
    took, phases = _start(folder, toy=toy)
    goal = GOALS.get(shape)
    wanted = {"goal": f"under {goal:.0f} s", "met": took < goal} if goal else {}
    yield Row(f"{shape}, {size / 1e9:.1f} GB of files: start to first token", f"{took:.1f} s", **wanted)
    for phase, seconds in phases.items():
        wanted = {"goal": "under 10 s", "met": seconds < 10} if "graph" in phase and shape == "Qwen3-0.6B" else {}
        yield Row(f"of that, {phase}", f"{seconds:.1f} s", **wanted)


def _start(folder: Path, *, toy: bool) -> tuple[float, dict[str, float]]:
    """Seconds in all, and of each phase of the worker's start by the engine's own account. Raises RuntimeError with its words."""
    command = [sys.executable, "-m", "bench.gpu.first_token", str(folder), *(["--toy"] if toy else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"no first token: {done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["seconds"], found["phases"]
