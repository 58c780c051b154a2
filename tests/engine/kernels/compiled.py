"""Compiles for an H200, without one, the kernels that a function launches: the code of Triton, and the report of ptxas.

A kernel that was imported to be interpreted cannot be compiled, so this goes on in a process of its own, kept for the session.
"""

import atexit
import functools
import multiprocessing
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

from starling_engine.platforms.triton_support import H200, INTERPRETED

MAX_SHARED = 227 << 10
"""Bytes of shared memory that a block may have on Hopper."""


IN_FLIGHT = 40 << 10
"""Bytes that an SM has to ask for at once to keep memory busy: its latency times its share of the bandwidth."""

MEMORY = r"\b((?:ld|st|atom|red|cp|prefetch)\.(?!param)[\w.]+)"
"""Instructions of PTX that read or write memory, but for parameters."""

SHARED, REGISTERS, THREADS, RESERVED = 228 << 10, 1 << 16, 2048, 1 << 10
"""An SM of Hopper has bytes of shared memory, registers and threads. Each block takes so much shared memory beside its own."""


@dataclass(frozen=True)
class Compiled:
    """One kernel. Bytes of shared memory a block, registers a thread, bytes of stack a thread (where ptxas spills)."""

    name: str
    shared: int
    registers: int
    stack: int
    threads: int
    ptx: str
    cubin: str
    overlaps: bool
    """True where it begins before the launch before it ends. Then it waits before it reads or writes anything."""

    @property
    def before_waiting(self) -> list[str]:
        """The instructions of memory that come before the wait for the launch before, in the order of the code."""
        begin, wait, _ = self.ptx.partition("griddepcontrol.wait")
        assert wait and "griddepcontrol.launch_dependents" in begin, (
            f"{self.name} overlaps, and neither waits nor lets others begin"
        )
        return re.findall(MEMORY, begin)

    @property
    def blocks(self) -> int:
        """Blocks that an SM holds at once. Registers are given out in eights."""
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return min(SHARED // (self.shared + RESERVED), by_registers, THREADS // self.threads)

    @property
    def in_flight(self) -> int:
        """The most bytes that an SM has asked for and not waited for yet: those of copies to shared memory, loops run once."""
        groups, most = [0], 0
        for size, wait in re.findall(r"cp\.async\.(?:c[ag]\.[^;]*?\], (0x\w+)|commit_group|wait_group (\d+))", self.ptx):
            if size:
                groups[-1] += int(size, 0)
            elif wait:
                groups = groups[-1 - int(wait) :]  # the last one is not committed yet
            else:
                groups.append(0)
            most = max(most, sum(groups))
        return self.blocks * self.threads * most

    @functools.cached_property
    def instructions(self) -> Counter[str]:
        """Counts how often the machine code has each instruction, with its modifiers, as LDG.E.128."""
        from triton import knobs

        dump = [knobs.nvidia.cuobjdump.path, "--dump-sass", self.cubin]
        code = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        return Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?\s*([A-Z][\w.]+)", code, re.MULTILINE))

    @property
    def products(self) -> set[str]:
        """The instructions of tensor cores in the machine code: HMMA of a warp, HGMMA and QGMMA (of FP8) of a warpgroup."""
        return {found[0] for each in self.instructions if (found := re.match(r"[A-Z]+MMA", each))}

    @property
    def spills(self) -> bool:
        """True where the machine code keeps values in memory, for want of registers."""
        return any(each.startswith(("LDL", "STL")) for each in self.instructions)


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
    own = kernel.metadata
    return Compiled(own.name, own.shared, registers, stack, 32 * own.num_warps, kernel.asm["ptx"], cubin, own.launch_pdl)
