"""What some requests want of the hidden states of their prompts: log probabilities, or a vector."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.ledger import LOGPROB_ROWS
from starling_engine.models.context import ForwardContext
from starling_engine.sampling.logprobs import read_scores, scores
from starling_engine.step import RowResult, StepPlan
from starling_engine.worker.device.readback import DeviceValues
from starling_engine.worker.host.batch import InputBatch, SlotState


class RunnableModel(Protocol):
    """forward(ids [T] int64, context, arrived) is [T, hidden]; logits(hidden [R, hidden]) is [R, vocab] fp32, in `out` if given."""

    def forward(self, ids: torch.Tensor, ctx: ForwardContext, arrived: torch.Tensor | None) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class NoModel:
    """In the model's place while there is none."""

    def forward(self, *_: object) -> NoReturn:
        raise AssertionError("no step is planned for a core that sleeps")

    logits = forward


class PromptOutputs:
    """`send` takes an array to where the hidden states are."""

    def __init__(self, model: RunnableModel, batch: InputBatch, send: Callable[[npt.NDArray[Any]], torch.Tensor]) -> None:
        self._model = model
        self._batch = batch
        self._send = send

    def ask(
        self, plan: StepPlan, last_token: npt.NDArray[np.int64], hidden: torch.Tensor, rows: list[RowResult]
    ) -> Iterator[DeviceValues]:
        """What fills in `rows`. `hidden` [T, hidden_size] is of all tokens, `last_token[r]` the index of each row's last one."""
        for r, slot in enumerate(plan.slots):
            if slot not in self._batch.special:
                continue
            occupant = self._batch.occupant(slot)
            if not occupant.reads_prompt(plan.starts[r]):
                continue
            first = int(last_token[r]) - plan.num_tokens[r] + 1
            own = hidden[first : first + plan.num_tokens[r]]
            if occupant.pooling is None:
                yield from self._prompt_logprobs(occupant, own, slot, plan.starts[r], rows[r])
            elif (vector := _pool(occupant, own, plan.starts[r], done=plan.sample[r])) is not None:
                yield DeviceValues(vector.view(torch.int32), partial(_take_vector, rows[r]))

    def _prompt_logprobs(
        self, occupant: SlotState, hidden: torch.Tensor, slot: int, start: int, row: RowResult
    ) -> Iterator[DeviceValues]:
        """Position p's hidden state tells the log probability of token p + 1; the last prompt token's belongs to the output."""
        assert occupant.sampling is not None and occupant.sampling.prompt_logprobs is not None
        most, row.prompt_logprobs = occupant.sampling.prompt_logprobs, []
        count = min(start + len(hidden), occupant.num_prompt - 1) - start
        following = self._send(self._batch.tokens[slot, start + 1 : start + 1 + count].astype(np.int64))
        for at in range(0, count, LOGPROB_ROWS):
            part = slice(at, min(at + LOGPROB_ROWS, count))
            logits = self._model.logits(hidden[part])
            yield DeviceValues(scores(logits, following[part], most), partial(_take_prompt_logprobs, row, most))


def _take_prompt_logprobs(row: RowResult, most: int, found: torch.Tensor) -> None:
    assert row.prompt_logprobs is not None
    row.prompt_logprobs += read_scores(found, [most] * len(found))


def _take_vector(row: RowResult, found: torch.Tensor) -> None:
    row.pooled = found.view(torch.float32).tolist()


def _pool(occupant: SlotState, hidden: torch.Tensor, start: int, *, done: bool) -> torch.Tensor | None:
    """[hidden_size] fp32. Pools over chunks: `occupant.pooled` holds the running sum, or the first token's state."""
    assert occupant.pooling is not None
    kind = occupant.pooling.pooling
    if kind == "mean":
        chunk = hidden.float().sum(dim=0)
        occupant.pooled = chunk if occupant.pooled is None else occupant.pooled + chunk
    elif kind == "cls" and start == 0:
        occupant.pooled = hidden[0].to(torch.float32, copy=True)
    if not done:
        return None
    vector = hidden[-1].float() if kind == "last" else occupant.pooled
    assert vector is not None
    if kind == "mean":
        vector = vector / (start + len(hidden))
    return torch.nn.functional.normalize(vector, dim=0) if occupant.pooling.normalize else vector
