"""What some requests want of the hidden states of their prompts: log probabilities, or a vector."""

from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.ledger import LOGPROB_ROWS
from starling_engine.models.context import ForwardContext
from starling_engine.sampling.logprobs import logprob_rows
from starling_engine.step import LogprobRow, RowResult, StepPlan
from starling_engine.worker.batch import InputBatch, Occupant


class Model(Protocol):
    """hidden = model(ids [T] int64, context, arrived) is [T, hidden]; logits(hidden [R, hidden]) is [R, vocab] fp32."""

    def forward(self, ids: torch.Tensor, ctx: ForwardContext, arrived: torch.Tensor | None) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class NoModel:
    """In the model's place while there is none."""

    def forward(self, *_: object) -> NoReturn:
        raise AssertionError("no step is planned for a core that sleeps")

    logits = forward


class Special:
    """Reads from the device what it gives, and so waits for it."""

    def __init__(self, model: Model, batch: InputBatch) -> None:
        self._model = model
        self._batch = batch

    def serve(self, plan: StepPlan, last_token: npt.NDArray[np.int64], hidden: torch.Tensor, rows: list[RowResult]) -> None:
        """Fills in `rows`. `hidden` [T, hidden_size] is of all tokens, `last_token[r]` the index of each row's last one."""
        for r, slot in enumerate(plan.slots):
            if slot not in self._batch.special:
                continue
            occupant = self._batch.occupant(slot)
            if not occupant.reads_prompt:
                continue
            first = int(last_token[r]) - plan.num_tokens[r] + 1
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
            following = torch.from_numpy(self._batch.tokens[slot, begin : begin + size].astype(np.int64)).to(hidden.device)
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
