"""A device that computes at once and delivers late, to catch code that does not wait for a GPU, or waits too early.

Copies to the host are garbage until somebody has waited for them. While a step is launched, nothing may wait for the device.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from starling_engine.kernels.state_replay import StateReplay
from starling_engine.models.decoder import Decoder
from starling_engine.platforms.cpu import CpuPlatform
from starling_engine.platforms.device_queue import DeviceEvent
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.worker import worker
from starling_engine.worker.device.device_runner import DeviceRunner

LAG = 0.002
GARBAGE = -7
WORKS = 30
"""Marks that a device passes before it breaks: past the warm-up."""
READS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods of a tensor that, on a GPU, wait for all work that is queued."""


class LateQueue(InlineQueue):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pinned: dict[int, torch.Tensor] = {}
        """Buffers by address. None is dropped, or another tensor could get its address."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrived = 0
        self._marks = 0

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = super().pinned(num_bytes)
        self._pinned[memory.data_ptr()] = memory
        return memory

    def record_event(self) -> DeviceEvent:
        return Late(self, len(self._copies), launching=Launching.here())

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.append((target, source.clone()))
        target.fill_(GARBAGE)

    def has_done(self, count: int) -> bool:
        return count <= self._arrived

    def arrive(self, count: int) -> None:
        with self._lock:
            for target, source in self._copies[self._arrived : count]:
                target.view(source.dtype)[:] = source
            self._arrived = max(count, self._arrived)


class Late:
    """Marks the end of the queue after its first `count` copies to the host."""

    def __init__(self, queue: LateQueue, count: int, *, launching: bool) -> None:
        self._queue = queue
        self._count = count
        self._launching = launching

    def wait(self) -> None:
        if not self._queue.has_done(self._count):
            assert not (Launching.here() and self._launching), "a step is launched, and an earlier one is waited for"
            time.sleep(LAG)
            self._queue.arrive(self._count)


class BreakingQueue(LateQueue):
    def record_event(self) -> DeviceEvent:
        self._marks += 1
        return Broken() if self._marks > WORKS else super().record_event()


class Broken:
    def wait(self) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class LatePlatform(CpuPlatform):
    async_scheduling = True

    def __init__(self, queue: LateQueue) -> None:
        super().__init__()
        self.queue = queue


class Launching:
    """True in a thread that launches a step; not while the model computes, which on a CPU reads tensors on the host."""

    _state = threading.local()

    @classmethod
    def here(cls) -> bool:
        return getattr(cls._state, "launching", False)

    @classmethod
    @contextmanager
    def set(cls, value: bool) -> Iterator[None]:
        before, cls._state.launching = cls.here(), value
        try:
            yield
        finally:
            cls._state.launching = before

    @classmethod
    def during(cls, value: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with cls.set(value):
                return function(*args, **options)

        return call


def use_late_device(patch: Callable[[Any, str, Any], None], *, recorded: bool = False, queue: LateQueue | None = None) -> None:
    """Workers of this process that are made from now on use such a device. Recordings run the work again, and so may read the host.

    `patch` is setattr, or a test's own, which is undone.
    """
    platform = LatePlatform(queue or LateQueue())
    copy = torch.Tensor.copy_

    def late_copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and platform.queue.holds(self):
            platform.queue.copy(self, source)
            return self
        return copy(self, source, non_blocking)

    def refuse(name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            assert not Launching.here(), f"a step is launched, and {name} of a tensor of the device is waited for"
            return read(self, *args, **options)

        return call

    patch(worker, "select_platform", lambda *_: platform)
    patch(torch.Tensor, "copy_", late_copy)
    for name in READS:
        patch(torch.Tensor, name, refuse(name))
    patch(DeviceRunner, "launch", Launching.during(True, DeviceRunner.launch))
    for computes, name in ((Decoder, "forward"), (StateReplay, "settle")):
        patch(computes, name, Launching.during(False, getattr(computes, name)))
    if recorded:
        patch(Decoder, "eager_reason", None)
