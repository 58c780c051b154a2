"""Runs plans in the calling thread, which does all the work: inputs, model, sampling."""

import time

import torch

from starling_engine.step import RowResult, StepPlan, StepResult
from starling_engine.worker.host.batch import InputBatch, StepInputs
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.host.sampler import Sampler
from starling_engine.worker.pending_step import Finished, PendingStep
from starling_engine.worker.prompt_outputs import NoModel, PromptOutputs, RunnableModel
from starling_engine.worker.stage import StageLink


class ModelRunner:
    """See `Runner`."""

    def __init__(self, model: RunnableModel, pages: KVPages, batch: InputBatch, sampler: Sampler, link: StageLink) -> None:
        self._pages = pages
        self._batch = batch
        self._sampler = sampler
        self._link = link
        self._use(model)

    def launch(self, plan: StepPlan) -> PendingStep:
        return Finished(self._execute(plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._batch.apply(plan)
        self._pages.copy(plan)
        inputs = self._batch.inputs(plan)
        arrived = self._link.receive(len(inputs.ids))
        if not self._link.last:
            self._link.send(self._forward(inputs, None, arrived))
            return StepResult(plan.step_id, plan.epoch, [], time.perf_counter() - began)
        sampling = [r for r, wanted in enumerate(plan.sample) if wanted and self._batch.slot_state(plan.slots[r]).pooling is None]
        last = torch.from_numpy(inputs.last_token[sampling])
        # Few requests need all states of their prompt; else only tokens that are sampled from leave the last layer.
        every = len(last) == len(inputs.ids) or self._batch.any_needs_all_hidden_states(plan)
        hidden = self._forward(inputs, None if every else last, arrived)
        picked = hidden[last] if every and len(last) < len(hidden) else hidden
        rows = self._sample(plan, inputs, sampling, picked)
        if self._batch.extra_slots:
            for output in self._prompt_outputs.compute(plan, inputs.last_token, hidden, rows):
                output.receive(output.values)
        return StepResult(plan.step_id, plan.epoch, rows, time.perf_counter() - began)

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)

    def on_sleep(self) -> None:
        self._use(NoModel())

    def on_wake(self, model: RunnableModel) -> None:
        self._use(model)

    def _use(self, model: RunnableModel) -> None:
        self._model = model
        self._prompt_outputs = PromptOutputs(model, self._batch, torch.from_numpy)

    def _forward(self, inputs: StepInputs, rows: torch.Tensor | None, arrived: torch.Tensor | None) -> torch.Tensor:
        return self._model.forward(inputs.ids, self._pages.context(inputs.metadata, rows), arrived)

    def _sample(self, plan: StepPlan, inputs: StepInputs, sampling: list[int], last: torch.Tensor) -> list[RowResult]:
        """Samples the rows that reached their last token, from their states `last`; other rows stay empty."""
        rows = [RowResult() for _ in plan.slots]
        if sampling:
            slots = [plan.slots[r] for r in sampling]
            sampled = self._sampler.sample(self._model.logits(last), self._batch, slots, inputs.ends[sampling])
            for r, row in zip(sampling, sampled, strict=True):
                rows[r] = row
        return rows
