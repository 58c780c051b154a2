"""One section, in a process of its own: keeps a line for the machine, then one for each figure as it is found.

usage: python -m bench.gpu.one SECTION [--toy] [--skip N]
"""

import argparse
import dataclasses
import importlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

from bench.gpu.faults import DeviceFault
from bench.gpu.keep import Rows
from bench.gpu.sections import SECTIONS


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu.one")
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--skip", type=int, default=0, help="cases that came before a fault of the device")
    arguments = parser.parse_args()
    section, kept = SECTIONS[arguments.section], Rows()
    if not arguments.skip:
        kept.add_machine(arguments.section, describe_machine(toy=arguments.toy))
    options = section.options | ({"skip": arguments.skip} if arguments.skip else {})
    try:
        for row in importlib.import_module(section.module).rows(toy=arguments.toy, **options):
            kept.add(arguments.section, dataclasses.replace(row, share=None, goal=None) if arguments.toy else row)
    except DeviceFault as fault:
        print(fault, file=sys.stderr, flush=True)
        again = ["-m", "bench.gpu.one", arguments.section, "--skip", str(fault.done), *(["--toy"] if arguments.toy else [])]
        os.execv(sys.executable, [sys.executable, *again])


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
