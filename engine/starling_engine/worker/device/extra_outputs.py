"""Outputs beyond a token drawn from the model's own logits: adjusted tokens, log probabilities, and prompt outputs.

They are queued behind the step and read with its result. Other rows are sampled within the step, which may be a recorded one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.ledger import LOGPROB_ROWS
from starling_engine.params import MAX_LOGPROBS, SamplingParams
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.sampling.adjust import Adjuster
from starling_engine.sampling.logprobs import read_scores, scores
from starling_engine.step import RowResult, StepPlan
from starling_engine.token_packing import unpack_tokens
from starling_engine.worker.device.device_adjuster import DeviceAdjuster
from starling_engine.worker.device.device_sampler import DeviceSampler
from starling_engine.worker.device.pinned import DeviceValues, Readback, send
from starling_engine.worker.device.step_writer import Fields
from starling_engine.worker.host.batch import FlatBatch, InputBatch, SlotState
from starling_engine.worker.prompt_outputs import PromptOutputs, RunnableModel


@dataclass(frozen=True, slots=True)
class ExtraSample:
    """Sample number `at` of a step, for position `end`."""

    at: int
    end: int
    state: SlotState
    row: RowResult

    @property
    def num_logprobs(self) -> int | None:
        return self.state.sampling.logprobs if self.state.sampling is not None else None


class ExtraOutputs:
    """Adjusts and scores rows of logits, at most LOGPROB_ROWS at once."""

    def __init__(self, batch: InputBatch, sampler: DeviceSampler, queue: DeviceQueue, device: torch.device) -> None:
        self._batch = batch
        self._sampler = sampler
        self._queue = queue
        self._device = device
        self._adjuster = DeviceAdjuster(queue, device, len(batch.slot_states), sampler.vocab_size)

    def use(self, model: RunnableModel) -> None:
        self._model = model
        self._prompt_outputs = PromptOutputs(model, self._batch, self._send)

    def forget(self) -> None:
        """Gives memory back, while there are no requests."""
        self._adjuster.forget()

    def serve(
        self,
        plan: StepPlan,
        step: FlatBatch,
        sampled: Sequence[int],
        f: Fields,
        hidden: torch.Tensor | None,
        rows: list[RowResult],
    ) -> Readback | None:
        """Queues the extra outputs of a step whose rows `sampled` have been sampled from; they fill in `rows`.

        Called for every plan in turn. `hidden` [T, hidden_size] is set if a row reads its prompt.
        """
        if not (extra_slots := self._batch.extra_slots):
            return None
        self._enter(plan)
        samples = [
            ExtraSample(at, int(step.ends[r]), self._batch.slot_state(plan.slots[r]), rows[r])
            for at, r in enumerate(sampled)
            if plan.slots[r] in extra_slots
        ]
        for part in _parts([sample for sample in samples if sample.state.adjuster is not None]):
            self._sample_adjusted(f, part, len(sampled))
        scored = _parts([sample for sample in samples if sample.num_logprobs is not None])
        outputs = [self._score(part, len(sampled)) for part in scored]
        if hidden is not None:
            outputs += self._prompt_outputs.compute(plan, step.query_end - 1, hidden, rows)
        return Readback(self._queue, outputs) if outputs else None

    def run_largest(self, f: Fields, hidden: torch.Tensor) -> None:
        """Does the most work that ever comes at once, behind a step of rows [R, hidden_size]; its memory is measured."""
        params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 0.0}, logprobs=MAX_LOGPROBS)
        state = SlotState(1, params, None, Adjuster(params, 1, ()))
        samples = [ExtraSample(at, 1, state, RowResult()) for at in range(min(len(hidden), LOGPROB_ROWS))]
        self._sample_adjusted(f, samples, len(hidden))
        self._score(samples, len(hidden))
        # A prompt's log probabilities, for any number of rows.
        states, following = hidden[:1].expand(LOGPROB_ROWS, -1).contiguous(), self._send(np.zeros(LOGPROB_ROWS, np.int64))
        scores(self._model.logits(states), following, MAX_LOGPROBS)

    def _enter(self, plan: StepPlan) -> None:
        for new in plan.new:
            adjuster = self._batch.slot_state(new.slot).adjuster
            if adjuster is not None:
                self._adjuster.enter(new.slot, adjuster, unpack_tokens(new.token_ids).tolist())

    def _sample_adjusted(self, f: Fields, samples: list[ExtraSample], count: int) -> None:
        """Replaces tokens drawn from the model's own logits by tokens of adjusted logits."""
        rows = self._rows(samples)
        slots = f.sampled_slots.index_select(0, rows)
        adjusters = [(sample.state.adjuster, sample.end) for sample in samples if sample.state.adjuster is not None]
        logits = self._adjuster.adjust(self._sampler.logits(count), rows, slots, adjusters)
        self._adjuster.count(slots, self._sampler.sample_again(f, rows, logits))

    def _score(self, samples: list[ExtraSample], count: int) -> DeviceValues:
        rows = self._rows(samples)
        chosen = self._sampler.out[:, 0].index_select(0, rows)
        most = max(sample.num_logprobs or 0 for sample in samples)
        return DeviceValues(
            scores(self._sampler.logits(count).index_select(0, rows), chosen, most), partial(_take_logprobs, samples)
        )

    def _rows(self, samples: list[ExtraSample]) -> torch.Tensor:
        return self._send(np.array([sample.at for sample in samples]))

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return send(self._queue, array, self._device)


def _parts(samples: list[ExtraSample]) -> Iterator[list[ExtraSample]]:
    for at in range(0, len(samples), LOGPROB_ROWS):
        yield samples[at : at + LOGPROB_ROWS]


def _take_logprobs(samples: list[ExtraSample], found: torch.Tensor) -> None:
    for sample, row in zip(samples, read_scores(found, [sample.num_logprobs or 0 for sample in samples]), strict=True):
        sample.row.logprobs = [row]
