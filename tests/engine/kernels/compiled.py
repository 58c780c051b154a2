"""Compiles for an H200, without one, the kernels that a function launches: the code of Triton, and the report of ptxas.

A kernel that was imported to be interpreted cannot be compiled, so this goes on in a process of its own, kept for the session.
"""

import atexit
import functools
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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
        """The most bytes that an SM has asked for and not waited for yet: those of copies to shared memory, loops run once.

        Copies of 4 bytes, as of page numbers, are left out: most threads do not make theirs.
        """
        groups, most = [0], 0
        for size, wait in re.findall(r"cp\.async\.(?:c[ag]\.[^;]*?\], (0x\w+)|commit_group|wait_group\s+(\d+))", self.ptx):
            if size:
                groups[-1] += int(size, 0) if int(size, 0) > 4 else 0
            elif wait:
                groups = groups[-1 - int(wait) :]  # the last one is not committed yet
            else:
                groups.append(0)
            most = max(most, sum(groups))
        assert self.threads * most <= self.shared, f"{self.name} has no room for what it would have asked for"
        return self.blocks * self.threads * most

    @functools.cached_property
    def code(self) -> list[tuple[int, str, str]]:
        """The machine code: each instruction's address, its name with modifiers, as LDG.E.128, and its operands."""
        from triton import knobs

        dump = [knobs.nvidia.cuobjdump.path, "--dump-sass", self.cubin]
        text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?\w+ )?\s*([A-Z][\w.]+)(.*?);", text, re.MULTILINE)
        return [(int(address, 16), name, operands) for address, name, operands in lines]

    @functools.cached_property
    def instructions(self) -> Counter[str]:
        """Counts how often the machine code has each instruction."""
        return Counter(name for _, name, _ in self.code)

    @property
    def loop(self) -> int:
        """Instructions of the longest loop with products of tensor cores in it, and no loop in it that has some, too."""
        ends = [(int(to[1], 16), at) for at, name, rest in self.code if name == "BRA" and (to := re.search(r"0x([0-9a-f]+)", rest))]
        loops = [(begin, end) for begin, end in ends if begin < end and self._multiplies(begin, end)]
        inner = [one for one in loops if not any(other != one and one[0] <= other[0] and other[1] <= one[1] for other in loops)]
        return max(sum(begin <= at <= end for at, _, _ in self.code) for begin, end in inner)

    def _multiplies(self, begin: int, end: int) -> bool:
        return any(re.match(r"[A-Z]+MMA", name) for at, name, _ in self.code if begin <= at <= end)

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


@contextmanager
def by_triton(folder: Path) -> Iterator[None]:
    """Has kernels compiled by the Triton that lies in `folder`, not by the installed one. Its process ends with the context."""
    with _compiler(folder) as process, mock.patch(f"{__name__}._process", lambda: process):
        yield


@functools.cache
def _process() -> ProcessPoolExecutor:
    executor = _compiler()
    atexit.register(executor.shutdown)
    return executor


def _compiler(folder: Path | None = None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (folder,))


def _begin(folder: Path | None) -> None:
    """Has kernels not interpreted, by the Triton of `folder` if there is one."""
    os.environ.pop(INTERPRETED, None)
    if folder is not None:
        sys.path.insert(0, str(folder))
        import triton

        assert Path(triton.__file__).is_relative_to(folder), "Triton was imported before"


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
