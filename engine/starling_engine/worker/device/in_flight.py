"""Steps that a device has been given, and the way of their results to the host."""

import time
from collections import deque

import torch

from starling_engine.platforms.device_queue import DeviceEvent, DeviceQueue
from starling_engine.step import StepResult
from starling_engine.worker.device.pinned import PinnedRing, Readback
from starling_engine.worker.host.batch import InputBatch, Ints, Samples, SlotState
from starling_engine.worker.host.sampler import fill_in


class LaunchedStep:
    """A `PendingStep` on a device. `result` has what is known so far; what was sampled comes from the device."""

    ready = False

    def __init__(self, result: StepResult, began: float, event: DeviceEvent, before: "LaunchedStep | None") -> None:
        self._result = result
        self._began = began
        self._event = event
        self._before = before
        self._ended = 0.0
        self.samples: Samples | None = None
        self.output: torch.Tensor | None = None
        """[S, 3] int64 in pinned memory: see `DeviceSampler.out`."""
        self.states: list[SlotState] = []
        """State of the slot of each row that is sampled from."""
        self.accepted: Ints | None = None
        """Accepted drafts of each of these rows, once they are known."""
        self.readback: Readback | None = None
        """Further values, on their way from the device."""

    def wait(self) -> None:
        """Waits until the step's tokens are known."""
        self._event.wait()
        if self.accepted is None and self.output is not None and self.samples is not None:
            self.accepted = self.samples.accepted((self.output[:, 0] == self.output[:, 2]).numpy())

    def finish(self) -> StepResult:
        self.wait()
        self._ended = time.perf_counter()
        if self.output is not None and self.samples is not None and self.accepted is not None:
            tokens, logits = self.output[:, 0].numpy(), self.output[:, 1].int().view(torch.float32).numpy()
            fill_in(self._result, self.samples, tokens, logits, self.accepted)
            self._result.unmatched = self.samples.unmatched(self.output[:, 2].numpy())
        if self.readback is not None:
            self.readback.read()
        # The device had the step before to do first.
        began = self._began if self._before is None else max(self._began, self._before._ended)
        self._before = None
        self._result.seconds = self._ended - began
        return self._result


class InFlight:
    """The steps in flight. `out` is DeviceSampler's: one copy behind each step reads it."""

    def __init__(self, batch: InputBatch, queue: DeviceQueue, out: torch.Tensor) -> None:
        self._batch = batch
        self._out = out
        self._ring = PinnedRing(queue, out.nbytes)
        self._newest: LaunchedStep | None = None
        self._open: deque[LaunchedStep] = deque()
        """Steps with drafts, of which the batch does not know how many are accepted."""

    def add(self, result: StepResult, samples: Samples, began: float) -> LaunchedStep:
        """Adds a step that has just been queued. What it sampled, and the time that it took, go to `result`."""
        count = len(samples)
        host = self._ring.take()[: 3 * 8 * count].view(torch.int64).view(count, 3)
        if count:
            host.copy_(self._out[:count], non_blocking=True)
        launched = self._newest = LaunchedStep(result, began, self._ring.given(), self._newest)
        if count:
            launched.samples, launched.output = samples, host
            self._batch.expect(samples, samples.drafts)
        if samples.drafts.any():
            launched.states = [self._batch.slot_state(slot) for slot in samples.slots[samples.first].tolist()]
            self._open.append(launched)
        return launched

    @property
    def knows_lengths(self) -> bool:
        """True where no draft is in flight: then sequences are as long as the batch has them."""
        return not self._open

    def absorb(self) -> None:
        """Shortens sequences in the batch by drafts that were not accepted, except in slots that have another request by now."""
        while self._open and self._open[0].accepted is not None:
            launched = self._open.popleft()
            samples, accepted = launched.samples, launched.accepted
            assert samples is not None and accepted is not None
            slots, refused = samples.slots[samples.first].tolist(), (samples.drafts - accepted).tolist()
            for slot, state, count in zip(slots, launched.states, refused, strict=True):
                if self._batch.slot_states[slot] is state:
                    self._batch.lengths[slot] -= count
