"""Host memory through which the device is told of a step, and tells what came of it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.platforms.queue import DeviceQueue, Mark

ENTRIES = 8
"""More than steps may be in flight: what came of a step is read before its buffer's turn comes again."""


class PinnedRing:
    """Page-locked buffers that take turns; one comes back when the device is done with what was in it."""

    def __init__(self, queue: DeviceQueue, num_bytes: int) -> None:
        self._queue = queue
        self._buffers = [queue.pinned(num_bytes) for _ in range(ENTRIES)]
        self._marks: list[Mark | None] = [None] * ENTRIES
        self._at = 0

    def take(self) -> torch.Tensor:
        """uint8 [num_bytes]; waits where all are in use."""
        self._at = (self._at + 1) % ENTRIES
        mark = self._marks[self._at]
        if mark is not None:
            mark.wait()
        return self._buffers[self._at]

    def given(self) -> Mark:
        """The buffer that was taken last is in use until the device has come to where its queue ends now."""
        mark = self._marks[self._at] = self._queue.mark()
        return mark


class Uploads:
    """Arrays on their way to the device with every step, through a ring; longer ones as `send` sends them."""

    def __init__(self, queue: DeviceQueue, device: torch.device, num_bytes: int) -> None:
        self._queue = queue
        self._ring = PinnedRing(queue, num_bytes)
        self._num_bytes = num_bytes
        self._device = device

    def send(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        """int64 [N] -> the same on the device, in its queue."""
        if array.nbytes > self._num_bytes:
            return send(self._queue, array, self._device)
        staged = self._ring.take()[: array.nbytes].view(torch.int64)
        staged.copy_(torch.from_numpy(array))
        sent = staged.to(self._device, non_blocking=True, copy=True)
        self._ring.given()
        return sent


def send(queue: DeviceQueue, array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """For what is sent now and then, of any length: never waited for, however many are on their way."""
    host = torch.from_numpy(array)
    staged = queue.pinned(array.nbytes).view(host.dtype).view(host.shape)
    staged.copy_(host)
    return staged.to(device, non_blocking=True)
