"""Runs the plans of an encoder, whose prompts are computed whole and cache nothing."""

import time
from collections.abc import Callable

import numpy as np
import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.model_config.adapters import AdapterConfig
from starling_engine.models.decoder import ForwardContext
from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.host.batch import FlatBatch, InputBatch
from starling_engine.worker.pending_step import Finished, PendingStep
from starling_engine.worker.prompt_outputs import NoModel, PromptOutputs, RunnableModel
from starling_engine.worker.stage import StageLink


class EncoderRunner:
    """See `Runner`. The calling thread waits for the device."""

    def __init__(
        self,
        model: RunnableModel,
        batch: InputBatch,
        link: StageLink,
        device: torch.device,
        tick: Callable[[], None],
        *,
        num_layers: int,
        adapters: AdapterConfig | None = None,
    ) -> None:
        """`num_layers` are those of this rank, `adapters` those of the checkpoint."""
        self._batch = batch
        self._link = link
        self._device = device
        self._tick = tick
        self._num_layers = num_layers
        self._adapters = {} if adapters is None else {name: at for at, name in enumerate(adapters.names)}
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)
        self._use(model)

    def launch(self, plan: StepPlan) -> PendingStep:
        began = time.perf_counter()
        result = StepResult(plan.step_id, plan.epoch)
        self._batch.apply(plan)
        step = self._batch.gather(plan)
        ids, context = self._inputs(step)
        hidden = self._model.forward(ids, context, self._link.receive(len(ids)))
        if self._link.last:
            result.counts = [0] * len(plan.slots)
            for output in self._prompt_outputs.compute(plan, step.query_end - 1, hidden, result):
                output.receive(output.values.cpu())
        else:
            self._link.send(hidden)
        result.seconds = time.perf_counter() - began
        return Finished(result)

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)

    def on_sleep(self) -> None:
        self._use(NoModel())

    def on_wake(self, model: RunnableModel) -> None:
        self._use(model)

    def _use(self, model: RunnableModel) -> None:
        self._model = model
        self._prompt_outputs = PromptOutputs(model, self._batch, lambda array: torch.from_numpy(array).to(self._device))

    def _inputs(self, step: FlatBatch) -> tuple[torch.Tensor, ForwardContext]:
        """Returns token ids [T], and the context of a pass over whole sequences."""
        device, starts, lengths = self._device, [0, *step.query_end.tolist()], self._seen(step)
        ids, positions = (torch.from_numpy(each).to(device, torch.int64) for each in (step.ids, step.positions))
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=positions,  # none is negative: each token is one
            query_start=torch.tensor(starts, dtype=torch.int32, device=device),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=self._nothing,
            max_query_len=step.longest,
            host_lens=(starts, lengths),
        )
        layers = self._num_layers
        types, adapters = self._types(step), self._adapters_of(step)
        return ids, ForwardContext([self._nothing] * layers, [metadata] * layers, types=types, adapters=adapters, tick=self._tick)

    def _adapters_of(self, step: FlatBatch) -> torch.Tensor | None:
        """Returns each token's adapter, [T] int64, as in `ForwardContext`."""
        none, pooling = len(self._adapters), [self._batch.slot_state(slot).pooling for slot in step.slots.tolist()]
        chosen = [none if one is None or one.adapter is None else self._adapters[one.adapter] for one in pooling]
        if all(each == none for each in chosen):
            return None
        return torch.from_numpy(np.repeat(chosen, step.ends - step.starts)).to(self._device, torch.int64)

    def _seen(self, step: FlatBatch) -> list[int]:
        """Returns how many tokens of each sequence are seen, its first ones."""
        pooling = [self._batch.slot_state(slot).pooling for slot in step.slots.tolist()]
        unseen = [None if one is None else one.unseen_from for one in pooling]
        return [length if first is None else min(length, first) for length, first in zip(step.ends.tolist(), unseen, strict=True)]

    def _types(self, step: FlatBatch) -> torch.Tensor | None:
        """Returns each token's segment, [T] int64: 1 in the second text of a pair. None where there are no pairs."""
        lengths = step.ends.tolist()
        seconds = [self._second_from(slot, length) for slot, length in zip(step.slots.tolist(), lengths, strict=True)]
        if seconds == lengths:
            return None
        types = step.positions >= np.repeat(seconds, step.ends - step.starts)
        return torch.from_numpy(types).to(self._device, torch.int64)

    def _second_from(self, slot: int, length: int) -> int:
        """Returns the first token of a sequence's second segment, or `length`."""
        pooling = self._batch.slot_state(slot).pooling
        return length if pooling is None or pooling.second_from is None else pooling.second_from
