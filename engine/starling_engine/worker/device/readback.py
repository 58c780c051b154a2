"""What a device works out for single requests, besides tokens: lists of numbers that the host reads with a step's result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from starling_engine.platforms.queue import DeviceQueue


@dataclass(frozen=True, slots=True)
class DeviceValues:
    """`values`, int32 of any shape (or fp32 seen as such), are on the device; `take` is called with the same on the host."""

    values: torch.Tensor
    take: Callable[[torch.Tensor], None]


class Readback:
    """Answers on their way to the host, by one copy behind all that has been queued."""

    def __init__(self, queue: DeviceQueue, answers: Sequence[DeviceValues]) -> None:
        flat = torch.cat([answer.values.flatten() for answer in answers])
        self._host = queue.pinned(flat.nbytes).view(torch.int32)
        self._host.copy_(flat, non_blocking=True)
        self._takes = [(answer.values.shape, answer.take) for answer in answers]

    def read(self) -> None:
        """Called once, when the device has come to where its queue ended."""
        at = 0
        for shape, take in self._takes:
            count = shape.numel()
            take(self._host[at : at + count].view(shape))
            at += count
