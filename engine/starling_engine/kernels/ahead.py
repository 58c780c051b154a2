"""Compiles kernels before they are needed: in processes of their own, on any machine, for a GPU that they do not touch.

A step runs on torch's meta device, where tensors have shapes and no memory. Its launches are noted and nothing is computed. Then
what was noted is compiled into Triton's cache, where the engine finds it. Not for a process that uses a GPU itself.
"""

import importlib.util
import logging
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from starling_engine.ipc.child import die_with_parent
from starling_engine.platforms import triton_support
from starling_engine.platforms.triton_support import GpuKind

logger = logging.getLogger("starling.worker")

Variant = tuple[Any, str]
"""A kernel (Triton's JITFunction), and what it is specialised to, in Triton's own words."""


class StandIn:
    """The part of Triton's driver that compiling needs."""

    def __init__(self, target: GpuKind) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._target.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def pretend(target: GpuKind) -> None:
    """Takes `target` for this process's GPU from now on, and kernels for launchable on the meta device."""
    from triton.runtime import driver

    driver.set_active(StandIn(target))
    triton_support.stand_in = target


def note_launches(work: Callable[[], object]) -> list[Variant]:
    """Returns the variants that `work` launches, each once, in their order. Needs `pretend`; kernels must not be interpreted."""
    from triton import knobs

    found: dict[tuple[str, str], Variant] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        found.setdefault((fn.jit_function.cache_key, key), (fn.jit_function, compile["specialization_data"]))
        return True  # no more than that

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        work()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found.values())


def compile_variants(variants: Iterable[Variant], processes: int, first: int = 0) -> int:
    """Compiles into Triton's cache, by so many processes; returns how many there were. Raises the first failure.

    `first`: with which to begin. Others who compile the same at the same time begin with another, and find what is done.
    """
    jobs = list(variants)
    if not jobs:
        return 0
    jobs = jobs[first % len(jobs) :] + jobs[: first % len(jobs)]
    # Forked, so that each has the kernels and nothing to import. For one that is killed `multiprocessing.Pool` waits without end.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(processes, len(jobs)), fork, _begin, (jobs,)) as pool:
        compiled = [pool.submit(_compile, number) for number in range(len(jobs))]
    for each in compiled:  # all others are done, too, when one has failed
        each.result()
    return len(jobs)


class LateKernels:
    """Counts kernels that are compiled, or loaded, from now on in this process, and logs each."""

    def __init__(self) -> None:
        self._seen = 0
        if importlib.util.find_spec("triton") is None:
            return
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._note

    def take(self) -> int:
        """Returns how many there were since the last call."""
        seen, self._seen = self._seen, 0
        return seen

    def _note(self, *, repr: str, **_: object) -> None:
        self._seen += 1
        logger.warning("a kernel was first met while serving: %s", repr)


_jobs: list[Variant] = []


def _begin(jobs: list[Variant]) -> None:
    die_with_parent()
    _jobs[:] = jobs


def _compile(number: int) -> None:
    kernel, data = _jobs[number]
    kernel.preload(data)
