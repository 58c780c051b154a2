"""Outputs beyond a token drawn from the model's own logits: adjusted tokens, log probabilities, and prompt outputs.

They are queued behind the step and read with its result. Other rows are sampled within the step, which may be a recorded one.
"""

from collections.abc import Iterator
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
from starling_engine.sampling.select import select_mask_op
from starling_engine.step import StepPlan, StepResult
from starling_engine.token_packing import unpack_tokens
from starling_engine.worker.device.device_adjuster import DeviceAdjuster
from starling_engine.worker.device.device_sampler import DeviceSampler
from starling_engine.worker.device.pinned import DeviceValues, Readback, send, send_stacked
from starling_engine.worker.device.step_writer import Fields
from starling_engine.worker.host.batch import FlatBatch, InputBatch, Samples, SlotState
from starling_engine.worker.masks import StepMasking
from starling_engine.worker.prompt_outputs import PromptOutputs, RunnableModel


@dataclass(frozen=True, slots=True)
class ExtraSample:
    """Sample number `at` of a step, behind draft number `offset` of its row, counted from 1; 0: behind the row's own last token."""

    at: int
    offset: int
    row: int
    state: SlotState
    mask: npt.NDArray[np.int32] | None = None
    """Words of its mask, on the host."""

    @property
    def num_logprobs(self) -> int | None:
        return self.state.sampling.logprobs if self.state.sampling is not None else None


class ExtraOutputs:
    """Adjusts, masks and scores rows of logits, at most LOGPROB_ROWS at once."""

    def __init__(
        self, batch: InputBatch, sampler: DeviceSampler, queue: DeviceQueue, device: torch.device, masking: StepMasking
    ) -> None:
        self._batch = batch
        self._masking = masking
        self._sampler = sampler
        self._queue = queue
        self._device = device
        self._adjuster = DeviceAdjuster(queue, device, len(batch.slot_states), sampler.vocab_size)
        self._mask_op = select_mask_op(device)

    def use(self, model: RunnableModel) -> None:
        self._model = model
        self._prompt_outputs = PromptOutputs(model, self._batch, self._send)

    def forget(self) -> None:
        """Gives memory back, while there are no requests."""
        self._adjuster.forget()

    def serve(
        self, plan: StepPlan, step: FlatBatch, samples: Samples, f: Fields, hidden: torch.Tensor | None, result: StepResult
    ) -> Readback | None:
        """Queues the extra outputs of a step that has been sampled from; they fill in `result`.

        Called for every plan in turn. `hidden` [T, hidden_size] is set if a row reads its prompt.
        """
        extra_slots, masked = self._batch.extra_slots, self._masking.of(plan, samples, result)
        if not extra_slots and masked is None:
            return None
        self._enter(plan)
        words = {} if masked is None else dict(zip(masked.at.tolist(), masked.words, strict=True))
        extras = [
            ExtraSample(first + offset, offset, row, self._batch.slot_state(plan.slots[row]), words.get(first + offset))
            for row, first, drafts in zip(samples.rows, samples.first.tolist(), samples.drafts.tolist(), strict=True)
            if plan.slots[row] in extra_slots or first in words
            for offset in range(1 + drafts)
        ]
        changed = [sample for sample in extras if sample.state.adjuster is not None or sample.mask is not None]
        if changed:
            self._sample_changed(f, changed, len(samples), int(samples.drafts.max()))
        scored = _parts([sample for sample in extras if sample.num_logprobs is not None])
        outputs = [self._score(part, len(samples), result) for part in scored]
        if hidden is not None:
            outputs += self._prompt_outputs.compute(plan, step.query_end - 1, hidden, result)
        return Readback(self._queue, outputs) if outputs else None

    def run_largest(self, f: Fields, hidden: torch.Tensor) -> None:
        """Does the most work that ever comes at once, behind a step of rows [R, hidden_size]; its memory is measured."""
        params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 0.0}, logprobs=MAX_LOGPROBS)
        state = SlotState(1, params, None, Adjuster(params, 1, ()))
        mask = np.zeros(-(-self._sampler.vocab_size // 32), np.int32)
        samples = [ExtraSample(at, 0, at, state, mask) for at in range(min(len(hidden), LOGPROB_ROWS))]
        self._sample_changed(f, samples, len(hidden), 0)
        self._score(samples, len(hidden), StepResult(-1, 0))
        # A prompt's log probabilities, for any number of rows.
        states, following = hidden[:1].expand(LOGPROB_ROWS, -1).contiguous(), self._send(np.zeros(LOGPROB_ROWS, np.int64))
        scores(self._model.logits(states), following, MAX_LOGPROBS)

    def _enter(self, plan: StepPlan) -> None:
        for new in plan.new:
            adjuster = self._batch.slot_state(new.slot).adjuster
            if adjuster is not None:
                self._adjuster.enter(new.slot, adjuster, unpack_tokens(new.token_ids).tolist())

    def _sample_changed(self, f: Fields, samples: list[ExtraSample], count: int, most_drafts: int) -> None:
        """Replaces tokens drawn from the model's own logits by tokens of adjusted or masked logits, of all such `samples`.

        The drafts before a sample count as output for it. They are counted one after the other, and taken back at the end.
        """
        adjusted = [sample for sample in samples if sample.state.adjuster is not None]
        for part in _parts([sample for sample in samples if sample.state.adjuster is None]):
            at = self._indices(part)
            self._sample_masked(f, part, at, self._sampler.logits(count).index_select(0, at))
        counted = self._indices(adjusted)
        behind = self._send(np.array([sample.offset for sample in adjusted], np.int64))
        slots, ends = f.sampled_slots.index_select(0, counted), f.ends.index_select(0, counted)
        drafts = f.ids.index_select(0, f.sampled.index_select(0, counted)).clamp_(min=0)  # for offset 0, and where OWN, none
        once = torch.ones_like(counted, dtype=torch.int32)
        for offset in range(most_drafts + 1 if adjusted else 0):
            if offset:
                self._adjuster.count(slots, drafts, once * (behind == offset))
            for part in _parts([sample for sample in adjusted if sample.offset == offset]):
                self._sample_adjusted(f, part, count)
        self._sampler.accept(f, most_drafts)
        if adjusted:
            self._adjuster.count(slots, drafts, -once * (behind > 0))
            chosen = self._sampler.out[:, 0].index_select(0, counted)
            self._adjuster.count(slots, chosen, once * self._sampler.counts(ends, slots))

    def _sample_adjusted(self, f: Fields, samples: list[ExtraSample], count: int) -> None:
        at = self._indices(samples)
        adjusters = [sample.state.adjuster for sample in samples if sample.state.adjuster is not None]
        slots, ends = f.sampled_slots.index_select(0, at), f.ends.index_select(0, at)
        self._sample_masked(f, samples, at, self._adjuster.adjust(self._sampler.logits(count), at, slots, ends, adjusters))

    def _sample_masked(self, f: Fields, samples: list[ExtraSample], at: torch.Tensor, logits: torch.Tensor) -> None:
        """Samples again from logits [R, vocab_size], under the masks of those samples that have one."""
        masks = {n: sample.mask for n, sample in enumerate(samples) if sample.mask is not None}
        if masks:
            rows, words = self._send(np.array(list(masks))), send_stacked(self._queue, list(masks.values()), self._device)
            self._mask_op(logits, rows, words)
        self._sampler.sample_again(f, at, logits)

    def _score(self, samples: list[ExtraSample], count: int, result: StepResult) -> DeviceValues:
        at = self._indices(samples)
        chosen = self._sampler.out[:, 0].index_select(0, at)
        most = max(sample.num_logprobs or 0 for sample in samples)
        return DeviceValues(
            scores(self._sampler.logits(count).index_select(0, at), chosen, most), partial(_take_logprobs, samples, result)
        )

    def _indices(self, samples: list[ExtraSample]) -> torch.Tensor:
        return self._send(np.array([sample.at for sample in samples], np.int64))

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return send(self._queue, array, self._device)


def _parts(samples: list[ExtraSample]) -> Iterator[list[ExtraSample]]:
    for at in range(0, len(samples), LOGPROB_ROWS):
        yield samples[at : at + LOGPROB_ROWS]


def _take_logprobs(samples: list[ExtraSample], result: StepResult, found: torch.Tensor) -> None:
    """Adds the log probabilities of the samples that count: those up to a row's last accepted draft."""
    for sample, row in zip(samples, read_scores(found, [sample.num_logprobs or 0 for sample in samples]), strict=True):
        if sample.offset < result.counts[sample.row]:
            extras = result.extras_of(sample.row)
            extras.logprobs = [*(extras.logprobs or ()), row]
