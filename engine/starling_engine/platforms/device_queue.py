"""A device that works on its own: calls are queued, and the host goes on."""

from collections.abc import Callable
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in the queue. Any thread may wait for it."""

    def wait(self) -> None:
        """Waits until the device has reached it. Raises torch.AcceleratorError for a fault on the way."""
        ...


Replay = Callable[[], None]


class DeviceQueue(Protocol):
    """The queue of the thread that runs the steps. Only `DeviceEvent.wait` is for other threads."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocates host memory, uint8, which copies use while the host goes on. Freed memory is reused only after its copies."""
        ...

    def record_event(self) -> DeviceEvent:
        """Marks the present end of the queue."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay:
        """Captures the calls that `work` queues; it must have run once before.

        The replay queues the same calls on the same tensors, whatever these hold by then.
        """
        ...

    def release_captures(self) -> None:
        """Frees the memory of captures. All of them have been dropped, and none is running."""
        ...

    def recording_bytes(self, work: Callable[[], None], count: int) -> int:
        """Returns the memory that `count` captures take beyond their tensors, by a few of `work`; 0 where that cannot be measured.

        `work` must have run once before, and its own tensors be few. All captures are released.
        """
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        """Returns the most memory that `work` takes beyond what was taken before; None where that cannot be measured."""
        ...
