"""Steps that a device has been given, and the way of their tokens to the batch."""

import time
from collections import deque

import torch

from starling_engine.platforms.device_queue import DeviceEvent, DeviceQueue
from starling_engine.step import RowResult, StepPlan, StepResult
from starling_engine.worker.device.pinned import PinnedRing, Readback
from starling_engine.worker.host.batch import FlatBatch, InputBatch, SlotState
from starling_engine.worker.host.sampler import fill_in


class LaunchedStep:
    """A `PendingStep` on a device. `rows` are its results so far; the rows `sampled` get their tokens from the device."""

    ready = False

    def __init__(
        self, plan: StepPlan, began: float, event: DeviceEvent, rows: list[RowResult], before: "LaunchedStep | None"
    ) -> None:
        self._plan = plan
        self._began = began
        self._event = event
        self._rows = rows
        self._before = before
        self._ended = 0.0
        self.sampled: list[int] = []
        self.output: torch.Tensor | None = None
        """[samples, 2] int64 in pinned memory: tokens, and whether their logits are finite."""
        self.targets: list[tuple[int, SlotState, int]] = []
        """Slot, its state, and the token's position, for each sample."""
        self.tokens: list[int] | None = None
        self.readback: Readback | None = None
        """Further values for `rows`, on their way from the device."""

    def wait(self) -> None:
        """Waits until the step's tokens are known."""
        self._event.wait()
        if self.tokens is None and self.output is not None:
            self.tokens = self.output[:, 0].tolist()

    def finish(self) -> StepResult:
        self.wait()
        self._ended = time.perf_counter()
        if self.output is not None:
            assert self.tokens is not None
            fill_in((self._rows[r] for r in self.sampled), self.tokens, self.output[:, 1].bool().tolist())
        if self.readback is not None:
            self.readback.read()
        # The device had the step before to do first.
        began = self._began if self._before is None else max(self._began, self._before._ended)
        self._before = None
        return StepResult(self._plan.step_id, self._plan.epoch, self._rows, self._ended - began)


class InFlight:
    """The steps in flight. `out` is DeviceSampler's: one copy behind each step reads it."""

    def __init__(self, batch: InputBatch, queue: DeviceQueue, out: torch.Tensor) -> None:
        self._batch = batch
        self._out = out
        self._ring = PinnedRing(queue, out.nbytes)
        self._newest: LaunchedStep | None = None
        self._open: deque[LaunchedStep] = deque()
        """Steps whose tokens the batch does not have yet."""

    def add(self, plan: StepPlan, step: FlatBatch, sampled: list[int], began: float, rows: list[RowResult]) -> LaunchedStep:
        """Adds a step that has just been queued, whose rows `sampled` were sampled from. Results go to `rows`."""
        count = len(sampled)
        host = self._ring.take()[: 2 * 8 * count].view(torch.int64).view(count, 2)
        if count:
            host.copy_(self._out[:count], non_blocking=True)
        launched = self._newest = LaunchedStep(plan, began, self._ring.given(), rows, self._newest)
        if count:
            launched.sampled, launched.output = sampled, host
            launched.targets = [
                (plan.slots[r], self._batch.slot_state(plan.slots[r]), int(end))
                for r, end in zip(sampled, step.ends[sampled], strict=True)
            ]
            self._open.append(launched)
        return launched

    def absorb(self) -> None:
        """Writes tokens that have come into the batch, except for slots that have another request by now."""
        while self._open and self._open[0].tokens is not None:
            launched = self._open.popleft()
            assert launched.tokens is not None
            for token, (slot, state, end) in zip(launched.tokens, launched.targets, strict=True):
                if self._batch.slot_states[slot] is state:
                    self._batch.tokens[slot, end] = token
