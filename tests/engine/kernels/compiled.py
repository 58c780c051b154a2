"""Compiles for an H200, without one, the kernels that a function launches: the code of Triton, and the report of ptxas.

A kernel that was imported to be interpreted cannot be compiled, so this goes on in a process of its own, kept for the session.
"""

import atexit
import functools
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

from starling_engine.platforms.triton_support import H200, INTERPRETED

MAX_SHARED = 227 << 10
"""Bytes of shared memory that a block may have on Hopper."""


@dataclass(frozen=True)
class Compiled:
    """One kernel. Bytes of shared memory a block, registers a thread, bytes of stack a thread (where ptxas spills)."""

    name: str
    shared: int
    registers: int
    stack: int
    ptx: str


def compiled(launch: Callable[..., object], *args: object, **options: object) -> list[Compiled]:
    """The kernels that `launch(*args, **options)` launches, in order, with all that its arguments specialise them to.

    `launch` is a function of a module that can be imported by name; it makes its tensors on the device "meta". Nothing runs.
    """
    return _process().submit(compile_here, functools.partial(launch, *args, **options)).result()


def in_compiler(work: Callable[..., Any], *args: object) -> Any:
    """Returns what `work(*args)` does in that process, where kernels are not interpreted."""
    return _process().submit(work, *args).result()


@functools.cache
def _process() -> ProcessPoolExecutor:
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _not_interpreted)
    atexit.register(executor.shutdown)
    return executor


def _not_interpreted() -> None:
    os.environ.pop(INTERPRETED, None)


def compile_here(launch: Callable[[], object]) -> list[Compiled]:
    """Does the same in that process."""
    from starling_engine.kernels.ahead import pretend
    from triton.runtime import JITFunction

    pretend(H200)
    run, kernels = JITFunction.run, []

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        _met.append(self)
        kernels.append(run(self, *args, **{**options, "warmup": True}))

    with mock.patch.object(JITFunction, "run", compile_only):
        launch()
    return [_look(kernel) for kernel in kernels]


_met: list[Any] = []
"""Triton's functions that were compiled in this process."""


def forget_compiled() -> None:
    """Makes that process compile again what it meets again: what is compiled would be launched, not noted."""
    for function in _met:
        function.device_caches.clear()
    _met.clear()


def _look(kernel: Any) -> Compiled:
    from triton import knobs

    cubin = next(path for path in kernel.metadata_group.values() if path.endswith(".cubin"))
    usage = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    )
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage.stdout)[1]) for word in ("REG", "STACK"))
    return Compiled(kernel.metadata.name, kernel.metadata.shared, registers, stack, kernel.asm["ptx"])
