"""Runs plans in the calling thread, which does all the work: inputs, model, sampling."""

import time

import torch

from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.drafted_states import DraftedStates
from starling_engine.worker.host.batch import FlatBatch, InputBatch, StepInputs
from starling_engine.worker.host.decodes import Decodes
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.host.recorded_steps import RecordedSteps
from starling_engine.worker.host.sampler import Sampler
from starling_engine.worker.masks import StepMasking
from starling_engine.worker.pending_step import Finished, PendingStep
from starling_engine.worker.prompt_outputs import NoModel, PromptOutputs, RunnableModel
from starling_engine.worker.stage import StageLink


class ModelRunner:
    """See `Runner`."""

    def __init__(
        self,
        model: RunnableModel,
        pages: KVPages,
        batch: InputBatch,
        sampler: Sampler,
        link: StageLink,
        masking: StepMasking,
        *,
        recorded_bytes: int,
    ) -> None:
        """Steps of few tokens are recorded and replayed in that much memory; 0 is for none."""
        self._pages = pages
        self._batch = batch
        self._sampler = sampler
        self._link = link
        self._masking = masking
        self._recorded_bytes = recorded_bytes
        self._drafted = DraftedStates(torch.from_numpy)
        self._use(model)

    def launch(self, plan: StepPlan) -> PendingStep:
        return Finished(self._execute(plan))

    def _execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._batch.apply(plan)
        result = StepResult(plan.step_id, plan.epoch)
        decodes = None if self._drafted.is_open or self._decodes is None or not self._decodes.takes(plan) else self._decodes
        step = self._settled(plan) if decodes is None else None
        self._pages.copy(plan)
        if decodes is None or not decodes.run(plan, result):
            self._run_any(plan, step or self._batch.gather(plan), result)
        result.seconds = time.perf_counter() - began
        return result

    def _settled(self, plan: StepPlan) -> FlatBatch:
        """Settles the states that had drafts before a step, and returns the step."""
        step = self._batch.gather(plan)
        self._drafted.leave([*plan.freed_slots, *(new.slot for new in plan.new)])
        self._drafted.settle_before(step)
        return step

    def _run_any(self, plan: StepPlan, step: FlatBatch, result: StepResult) -> None:
        """Runs a step whose blocks are copied."""
        batch = self._batch
        inputs = batch.inputs(step)
        if self._pages.has_state:
            self._drafted.begin(step, inputs.metadata[-1])
        arrived = self._link.receive(len(inputs.ids))
        if not self._link.last:
            self._link.send(self._forward(inputs, None, arrived))
            return
        result.counts = [0] * len(plan.slots)
        samples = step.samples(batch.sampling_rows(plan))
        last = torch.from_numpy(samples.tokens)
        hidden, logits = self._compute(inputs, last, arrived, whole=batch.any_needs_all_hidden_states(plan))
        if logits is not None:
            self._sampler.sample(logits, batch, samples, self._masking.of(plan, samples, result), result)
        if batch.extra_slots:
            for output in self._prompt_outputs.compute(plan, step.query_end - 1, hidden, result):
                output.receive(output.values)

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)
        self._drafted.leave([slot])

    def on_sleep(self) -> None:
        self._use(NoModel())
        self._drafted.forget()

    def on_wake(self, model: RunnableModel) -> None:
        self._use(model)

    def _use(self, model: RunnableModel) -> None:
        self._model = model
        self._prompt_outputs = PromptOutputs(model, self._batch, torch.from_numpy)
        widths = [table.shape[1] for table in self._batch.tables]
        size = self._recorded_bytes
        self._recorded = RecordedSteps(model, self._pages, widths, size) if size else None
        self._decodes = Decodes(self._batch, self._recorded) if self._recorded is not None else None

    def _compute(
        self, inputs: StepInputs, last: torch.Tensor, arrived: torch.Tensor | None, *, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns hidden states, and the logits of the tokens `last`, or None without any.

        Few requests need all states of their prompt (`whole`); else only tokens that are sampled from leave the last layer.
        """
        if len(last) == len(inputs.ids):
            if not whole and self._recorded is not None and (found := self._recorded.run(inputs)) is not None:
                return found
            hidden = self._forward(inputs, None, arrived)
            return hidden, self._model.logits(hidden)
        hidden = self._forward(inputs, None if whole else last, arrived)
        picked = hidden[last] if whole else hidden
        return hidden, self._model.logits(picked) if len(last) else None

    def _forward(self, inputs: StepInputs, rows: torch.Tensor | None, arrived: torch.Tensor | None) -> torch.Tensor:
        return self._model.forward(inputs.ids, self._pages.context(inputs.metadata, rows), arrived)
