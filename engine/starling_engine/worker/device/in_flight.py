"""Steps that a device has been given, and how their tokens come to the batch."""

from collections import deque

import torch

from starling_engine.platforms.queue import DeviceQueue
from starling_engine.step import RowResult, StepPlan
from starling_engine.worker.device.on_device import OnDevice
from starling_engine.worker.device.pinned import PinnedRing
from starling_engine.worker.host.batch import FlatBatch, InputBatch


class InFlight:
    """`out` as DeviceSampler has it: read once for each step, by a copy behind it."""

    def __init__(self, batch: InputBatch, queue: DeviceQueue, out: torch.Tensor) -> None:
        self._batch = batch
        self._out = out
        self._ring = PinnedRing(queue, out.nbytes)
        self._newest: OnDevice | None = None
        self._open: deque[OnDevice] = deque()
        """Steps whose tokens the batch does not have yet."""

    def add(self, plan: StepPlan, step: FlatBatch, sampled: list[int], began: float, rows: list[RowResult]) -> OnDevice:
        """A step that has just been queued, whose rows `sampled` were sampled from. Results go to `rows`."""
        count = len(sampled)
        host = self._ring.take()[: 2 * 8 * count].view(torch.int64).view(count, 2)
        if count:
            host.copy_(self._out[:count], non_blocking=True)
        launched = self._newest = OnDevice(plan, began, self._ring.given(), rows, self._newest)
        if count:
            launched.sampled, launched.output = sampled, host
            launched.places = [
                (plan.slots[r], self._batch.occupant(plan.slots[r]), int(end))
                for r, end in zip(sampled, step.ends[sampled], strict=True)
            ]
            self._open.append(launched)
        return launched

    def absorb(self) -> None:
        """Writes tokens that have come into the batch, whose requests may be others by now."""
        while self._open and self._open[0].tokens is not None:
            launched = self._open.popleft()
            assert launched.tokens is not None
            for token, (slot, occupant, end) in zip(launched.tokens, launched.places, strict=True):
                if self._batch.occupants[slot] is occupant:
                    self._batch.tokens[slot, end] = token
