"""Runs one plan on the device: inputs, model, sampling."""

import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import numpy as np
import torch

from starling_engine.kv.spec import KVGroup
from starling_engine.ledger import LOGPROB_ROWS
from starling_engine.models.context import ForwardContext
from starling_engine.sampling.logprobs import logprob_rows
from starling_engine.step import LogprobRow, RowResult, StepPlan, StepResult
from starling_engine.worker.batch import InputBatch, Occupant, StepInputs
from starling_engine.worker.sampler import Sampler
from starling_engine.worker.stage import StageLink


class Model(Protocol):
    """hidden = model(ids [T] int64, context, arrived) is [T, hidden]; logits(hidden [R, hidden]) is [R, vocab] fp32."""

    def forward(self, ids: torch.Tensor, context: ForwardContext, arrived: torch.Tensor | None) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class NoModel:
    """In the model's place while there is none."""

    def forward(self, *_: object) -> NoReturn:
        raise AssertionError("no step is planned for a core that sleeps")

    logits = forward


class ModelRunner:
    """`kv` has each layer's view of the pool, of the layers that are here; `tick` is called as each ends."""

    def __init__(
        self,
        model: Model,
        kv: list[torch.Tensor],
        groups: list[KVGroup],
        batch: InputBatch,
        sampler: Sampler,
        tick: Callable[[], None],
        link: StageLink,
    ) -> None:
        self._model: Model = model
        self._kv = kv
        self._groups = groups
        self._batch = batch
        self._sampler = sampler
        self._tick = tick
        self._link = link
        self._group_of = {layer: g for g, group in enumerate(groups) for layer in group.layers}
        self._place = {layer: at for at, layer in enumerate(sorted(self._group_of))}

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self._batch.apply(plan)
        self._copy_blocks(plan)
        inputs = self._batch.inputs(plan)
        arrived = self._link.receive(len(inputs.ids))
        if not self._link.last:
            self._link.send(self._forward(inputs, None, arrived))
            return StepResult(plan.step_id, plan.epoch, [], time.perf_counter() - began)
        sampling = [r for r, wanted in enumerate(plan.sample) if wanted and self._batch.occupant(plan.slots[r]).pooling is None]
        last = torch.from_numpy(inputs.last_token[sampling])
        # A prompt's own states are wanted by few; else only the tokens that are sampled from leave the last layer.
        every = len(last) == len(inputs.ids) or self._batch.reads_prompts(plan.slots)
        hidden = self._forward(inputs, None if every else last, arrived)
        picked = hidden[last] if every and len(last) < len(hidden) else hidden
        rows = self._sample(plan, inputs, sampling, picked)
        if self._batch.special:
            self._serve_special(plan, inputs, hidden, rows)
        return StepResult(plan.step_id, plan.epoch, rows, time.perf_counter() - began)

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)

    def on_sleep(self) -> None:
        """Weights and cache have gone: whatever keeps their addresses or a part of the model is to be dropped here."""
        self._model = NoModel()

    def on_wake(self, model: Model) -> None:
        """All is there again, at other addresses than before; `model` may be another object, the cache's tensors are the same.

        What a device is to replay has to be recorded anew, best when it is first wanted: whoever wakes the engine waits for this.
        """
        self._model = model

    def _copy_blocks(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            for layer in self._groups[copy.group].layers:
                pages = self._kv[self._place[layer]]
                pages[copy.target] = pages[copy.source]

    def _forward(self, inputs: StepInputs, rows: torch.Tensor | None, arrived: torch.Tensor | None) -> torch.Tensor:
        per_layer = [inputs.metadata[self._group_of[layer]] for layer in self._place]
        return self._model.forward(inputs.ids, ForwardContext(self._kv, per_layer, rows, self._tick), arrived)

    def _sample(self, plan: StepPlan, inputs: StepInputs, sampling: list[int], last: torch.Tensor) -> list[RowResult]:
        """Samples the rows that reached their last token, whose states are `last`; the others' results stay empty."""
        rows = [RowResult() for _ in plan.slots]
        if sampling:
            slots = [plan.slots[r] for r in sampling]
            sampled = self._sampler.sample(self._model.logits(last), self._batch, slots, inputs.ends[sampling])
            for r, row in zip(sampling, sampled, strict=True):
                rows[r] = row
        return rows

    def _serve_special(self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, rows: list[RowResult]) -> None:
        for r, slot in enumerate(plan.slots):
            if slot not in self._batch.special:
                continue
            occupant = self._batch.occupant(slot)
            if not occupant.reads_prompt:
                continue
            first = int(inputs.last_token[r]) - plan.num_tokens[r] + 1
            own = hidden[first : first + plan.num_tokens[r]]
            if occupant.pooling is not None:
                rows[r].pooled = _pool(occupant, own, plan.starts[r], done=plan.sample[r])
            else:
                rows[r].prompt_logprobs = self._prompt_logprobs(occupant, own, slot, plan.starts[r])

    def _prompt_logprobs(self, occupant: Occupant, hidden: torch.Tensor, slot: int, start: int) -> list[LogprobRow]:
        """Position p's hidden state tells the log probability of token p + 1; the last prompt token's belongs to the output."""
        assert occupant.sampling is not None and occupant.sampling.prompt_logprobs is not None
        count = min(start + len(hidden), occupant.num_prompt - 1) - start
        rows: list[LogprobRow] = []
        for at in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - at)
            begin = start + at + 1
            following = torch.from_numpy(self._batch.tokens[slot, begin : begin + size].astype(np.int64))
            logits = self._model.logits(hidden[at : at + size])
            rows += logprob_rows(logits, following, [occupant.sampling.prompt_logprobs] * size)
        return rows


def _pool(occupant: Occupant, hidden: torch.Tensor, start: int, *, done: bool) -> list[float] | None:
    """Pools over chunks: `occupant.pooled` holds the running sum, or the first token's state."""
    assert occupant.pooling is not None
    kind = occupant.pooling.pooling
    if kind == "mean":
        chunk = hidden.float().sum(dim=0)
        occupant.pooled = chunk if occupant.pooled is None else occupant.pooled + chunk
    elif kind == "cls" and start == 0:
        occupant.pooled = hidden[0].float()
    if not done:
        return None
    vector = hidden[-1].float() if kind == "last" else occupant.pooled
    assert vector is not None
    if kind == "mean":
        vector = vector / (start + len(hidden))
    if occupant.pooling.normalize:
        vector = torch.nn.functional.normalize(vector, dim=0)
    result: list[float] = vector.tolist()
    return result
