"""A device that works on its own: what is asked of it is queued, and the host goes on."""

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the queue. May be waited for by any thread."""

    def wait(self) -> None:
        """Until the device has come to it. Raises torch.AcceleratorError for a fault on the way."""
        ...


Replay = Callable[[], None]


class DeviceQueue(Protocol):
    """The queue of the thread that runs the steps; all but `Mark.wait` is for that thread."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory, uint8, from and to which copies need not be waited for. Once dropped it is not given again to anybody before
        the copies under way are done.
        """
        ...

    def mark(self) -> Mark:
        """The queue's end as it is now."""
        ...

    def record(self, work: Callable[[], None]) -> Replay:
        """Records what `work` asks of the device, which must have been run once before; the replay asks the same of it again, with
        whatever lies in the same tensors by then.
        """
        ...

    def forget(self) -> None:
        """All recordings have been dropped, and none of them runs: their memory is of no use any more."""
        ...

    def peak_bytes(self, work: Callable[[], None]) -> int | None:
        """Memory that `work` takes at its height beyond what was taken before; None where that cannot be measured."""
        ...
