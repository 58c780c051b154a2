"""Numbers that a device computes for single requests beyond tokens: the host reads them with a step's result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from starling_engine.platforms.device_queue import DeviceQueue


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
