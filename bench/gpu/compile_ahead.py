"""Compiles the kernels of a section's cases by all CPUs at once, before the first of them runs.

usage: python -m bench.gpu.compile_ahead MODULE [--toy]

`MODULE`.cases(toy=...) are run on torch's meta device, where they launch nothing.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.keep import ROOT, keep_failure
from bench.gpu.table import Row

LEAST_SECONDS = 60.0
"""Kernels that are not compiled by then are compiled one by one, as they come."""


def compile_ahead(module: str, *, toy: bool) -> Row:
    """Returns what it did, as a row. It runs in a process of its own, which takes no memory of the GPU."""
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu.compile_ahead", module, *(["--toy"] if toy else [])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LEAST_SECONDS, env=environment, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return Row("kernels compiled ahead", f"not all in {LEAST_SECONDS:.0f} s")
    if done.returncode:
        keep_failure("kernels compiled ahead", done.stderr)
        return Row("kernels compiled ahead", "failed")
    count, processes = done.stdout.split()[-2:]
    how = "noted" if toy else f"compiled ahead by {processes} processes"
    return Row(f"{count} kernels {how}", f"{time.monotonic() - began:.1f} s")


def before_kernels(module: str, *, toy: bool, skip: int) -> Iterator[Row]:
    """Begins a section before its kernels are imported; what it compiled is its first row. `skip` is that of `each_case`."""
    if toy:
        os.environ["TRITON_INTERPRET"] = "1"
    if not skip:
        yield compile_ahead(module, toy=toy)


def main() -> None:
    import torch
    from starling_engine.kernels.ahead import Variant, compile_variants, note_launches, pretend
    from starling_engine.platforms.cgroup import cpu_limit
    from starling_engine.platforms.triton_support import H200

    pretend(H200)  # an H100 has its capability and its number of processors
    found: dict[tuple[str, str], Variant] = {}
    for case in importlib.import_module(sys.argv[1]).cases(toy="--toy" in sys.argv):
        for kernel, data in note_launches(_quietly(case.make, torch.device("meta"), case.what)):
            found.setdefault((kernel.cache_key, data), (kernel, data))
    if "--toy" not in sys.argv:
        compile_variants(found.values(), cpu_limit())
    print(len(found), cpu_limit())


def _quietly(make: Callable[..., Any], device: Any, what: str) -> Callable[[], None]:
    """A case that needs values, which the meta device has not, is compiled when it runs."""

    def work() -> None:
        try:
            make(device)()
        except Exception as error:  # noqa: BLE001 - the case meets it again when it runs, and is a row then
            print(f"{what}: not ahead: {error!r}", file=sys.stderr)

    return work


if __name__ == "__main__":
    main()
