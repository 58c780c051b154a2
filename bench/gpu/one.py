"""One section, in a process of its own: writes a line of JSON for the machine, then one for each figure as it is found.

usage: python -m bench.gpu.one SECTION FILE [--toy]
"""

import dataclasses
import importlib
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version

from bench.gpu.sections import SECTIONS


def main() -> None:
    name, file, toy = sys.argv[1], Path(sys.argv[2]), "--toy" in sys.argv[3:]
    with file.open("w") as found:
        print(json.dumps(describe_machine(toy=toy)), file=found, flush=True)
        for row in importlib.import_module(SECTIONS[name].module).rows(toy=toy):
            shown = dataclasses.replace(row, share=None, goal=None) if toy else row
            print(json.dumps(dataclasses.asdict(shown)), file=found, flush=True)


def describe_machine(*, toy: bool) -> str:
    """Exits where there is no GPU to measure. Makes no CUDA context: that would hold memory which the engine is to have."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton"))
    commit = _output("git", "describe", "--always", "--dirty") or "of no known commit"
    software = f"Python {python_version()}, {packages}, Starling {commit}"
    if toy:
        return f"A toy on a CPU: its figures mean nothing. {software}"
    gpu = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if gpu is None:
        sys.exit("no NVIDIA GPU here: nvidia-smi does not answer")
    name, memory, driver = (part.strip() for part in gpu.splitlines()[0].split(","))
    return f"{name}, {memory}, driver {driver}; {software}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _output(*command: str) -> str | None:
    """What a program says; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
