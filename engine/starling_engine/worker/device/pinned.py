"""Pinned host memory for a step's inputs and results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.platforms.device_queue import DeviceEvent, DeviceQueue

ENTRIES = 8
"""More than steps may be in flight: a step's results are read before its buffer's turn comes again."""


class PinnedRing:
    """Page-locked buffers that take turns; a buffer is free again when the device is done with its contents."""

    def __init__(self, queue: DeviceQueue, num_bytes: int) -> None:
        self._queue = queue
        self._buffers = [queue.pinned(num_bytes) for _ in range(ENTRIES)]
        self._events: list[DeviceEvent | None] = [None] * ENTRIES
        self._at = 0

    def take(self) -> torch.Tensor:
        """Returns a buffer, uint8 [num_bytes]; waits while all are in use."""
        self._at = (self._at + 1) % ENTRIES
        event = self._events[self._at]
        if event is not None:
            event.wait()
        return self._buffers[self._at]

    def given(self) -> DeviceEvent:
        """Marks the buffer that was taken last as in use until the device has done all that is queued now."""
        event = self._events[self._at] = self._queue.record_event()
        return event


class Uploads:
    """Uploads of small arrays with every step, through a ring; longer ones go as with `send`."""

    def __init__(self, queue: DeviceQueue, device: torch.device, num_bytes: int) -> None:
        self._queue = queue
        self._ring = PinnedRing(queue, num_bytes)
        self._num_bytes = num_bytes
        self._device = device

    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Returns a copy of int64 [N] on the device, in its queue."""
        if array.nbytes > self._num_bytes:
            return send(self._queue, array, self._device)
        staged = self._ring.take()[: array.nbytes].view(torch.int64)
        staged.copy_(torch.from_numpy(array))
        sent = staged.to(self._device, non_blocking=True, copy=True)
        self._ring.given()
        return sent


def send(queue: DeviceQueue, array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a copy on the device of an array of any length, from a buffer of its own: it never waits. For rare uploads."""
    host = torch.from_numpy(array)
    staged = queue.pinned(array.nbytes).view(host.dtype).view(host.shape)
    staged.copy_(host)
    return staged.to(device, non_blocking=True)


def send_stacked(queue: DeviceQueue, arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> torch.Tensor:
    """Returns int32 [N, W] on the device, from N arrays [W] that are copied once on the host. Otherwise as `send`."""
    staged = queue.pinned(sum(array.nbytes for array in arrays)).view(torch.int32).view(len(arrays), -1)
    np.stack(arrays, out=staged.numpy())
    return staged.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class DeviceValues:
    """Values on the device, int32 of any shape (or fp32 viewed as int32). `receive` is called with their copy on the host."""

    values: torch.Tensor
    receive: Callable[[torch.Tensor], None]


class Readback:
    """Values on their way to the host, by one copy behind all that is queued."""

    def __init__(self, queue: DeviceQueue, outputs: Sequence[DeviceValues]) -> None:
        flat = torch.cat([output.values.flatten() for output in outputs])
        self._host = queue.pinned(flat.nbytes).view(torch.int32)
        self._host.copy_(flat, non_blocking=True)
        self._receivers = [(output.values.shape, output.receive) for output in outputs]

    def read(self) -> None:
        """Hands out the values. Called once, when the device has finished what was queued before."""
        at = 0
        for shape, receive in self._receivers:
            count = shape.numel()
            receive(self._host[at : at + count].view(shape))
            at += count
