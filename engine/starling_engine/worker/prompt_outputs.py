"""Outputs of a prompt's hidden states: log probabilities, or vectors."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.ledger import LOGPROB_ROWS
from starling_engine.models.decoder import ForwardContext
from starling_engine.params import OF_TOKENS, PoolingParams
from starling_engine.sampling.logprobs import read_scores, scores
from starling_engine.step import RowExtras, StepPlan, StepResult
from starling_engine.worker.device.pinned import DeviceValues
from starling_engine.worker.host.batch import InputBatch, SlotState


class RunnableModel(Protocol):
    """A model that runs steps.

    embed    ids and positions [T] int64 -> [T, hidden], in the first stage
    forward  ids [T] int64 -> [T, hidden]; `arrived` [T, hidden] comes from the stage before, or from `embed`, in place of ids
    logits   hidden [R, hidden] -> [R, vocab] fp32, in `out` if given
    classify hidden [N, hidden] -> [N, labels] fp32
    add_lexical  hidden [N, hidden], ids [N] and weights [vocab] fp32 of tokens before, if any -> those of all
    project  hidden [..., hidden] fp32 -> the vectors that it gives; `project_tokens` those of tokens
    """

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

    def forward(self, ids: torch.Tensor, ctx: ForwardContext, arrived: torch.Tensor | None) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...

    def classify(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def add_lexical(self, hidden: torch.Tensor, ids: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor: ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def project_tokens(self, hidden: torch.Tensor) -> torch.Tensor: ...


class NoModel:
    """Stands in for the model while the engine sleeps."""

    def forward(self, *_: object) -> NoReturn:
        raise AssertionError("no step is planned for a core that sleeps")

    embed = logits = classify = add_lexical = project = project_tokens = forward


class PromptOutputs:
    """Computes the prompt outputs of a batch's requests. `send` copies an array to the device of the hidden states."""

    def __init__(self, model: RunnableModel, batch: InputBatch, send: Callable[[npt.NDArray[Any]], torch.Tensor]) -> None:
        self._model = model
        self._batch = batch
        self._send = send

    def compute(
        self, plan: StepPlan, last_token: npt.NDArray[np.int64], hidden: torch.Tensor, result: StepResult
    ) -> Iterator[DeviceValues]:
        """Yields values that fill in `result`. `hidden` [T, hidden_size] has all tokens, `last_token` [R] each row's last."""
        for r, slot in enumerate(plan.slots):
            if slot not in self._batch.extra_slots:
                continue
            state = self._batch.slot_state(slot)
            if not state.needs_all_hidden_states(plan.starts[r]):
                continue
            first = int(last_token[r]) - plan.num_tokens[r] + 1
            row_hidden = hidden[first : first + plan.num_tokens[r]]
            if state.pooling is None:
                yield from self._prompt_logprobs(state, row_hidden, slot, plan.starts[r], result.extras_of(r))
            elif state.pooling.task in OF_TOKENS:
                yield from self._token_rows(state, row_hidden, result.extras_of(r) if plan.sample[r] else None)
            elif state.pooling.task == "sparse_embed":
                self._add_lexical(state, row_hidden, slot, plan.starts[r])
                if plan.sample[r] and state.pooled is not None:
                    yield DeviceValues(state.pooled.view(torch.int32), partial(_take_sparse, result.extras_of(r)))
            elif (vector := self._pool(state, row_hidden, plan.starts[r], done=plan.sample[r])) is not None:
                yield DeviceValues(vector.view(torch.int32), partial(_take_vector, result.extras_of(r)))

    def _pool(self, state: SlotState, hidden: torch.Tensor, start: int, *, done: bool) -> torch.Tensor | None:
        """Returns a row's vector, or the logits that stand for it, once the row is at its end."""
        assert state.pooling is not None
        tokens = state.pooling.logit_token_ids
        if state.pooling.pooling == "late":
            return self._mean_of_labels(state, hidden, start, done=done)
        if tokens is None:
            pooled = _pool(state, hidden, start, done=done)
            return None if pooled is None else self._numbers(state.pooling, pooled[None])[0]
        return self._model.logits(hidden[-1:])[0, tokens] if done else None

    def _mean_of_labels(self, state: SlotState, hidden: torch.Tensor, start: int, *, done: bool) -> torch.Tensor | None:
        """Adds up the numbers of a row's tokens in `state.pooled`; returns their mean, [labels] fp32, at the row's end."""
        for at in range(0, len(hidden), LOGPROB_ROWS):
            found = self._model.classify(hidden[at : at + LOGPROB_ROWS]).sum(dim=0)
            state.pooled = found if state.pooled is None else state.pooled + found
        assert state.pooled is not None, "a row has tokens"
        return state.pooled / (start + len(hidden)) if done else None

    def _add_lexical(self, state: SlotState, hidden: torch.Tensor, slot: int, start: int) -> None:
        """Adds a row's tokens, which begin at position `start`, to the weights that lie in `state.pooled`."""
        ids = self._send(self._batch.tokens[slot, start : start + len(hidden)].astype(np.int64))
        for at in range(0, len(hidden), LOGPROB_ROWS):
            part = slice(at, at + LOGPROB_ROWS)
            state.pooled = self._model.add_lexical(hidden[part], ids[part], state.pooled)

    def _token_rows(self, state: SlotState, hidden: torch.Tensor, extras: RowExtras | None) -> Iterator[DeviceValues]:
        """Yields the numbers of the tokens of a row; `extras` gets those of all steps, and is set in the last one."""
        assert state.pooling is not None
        for at in range(0, len(hidden), LOGPROB_ROWS):
            end = at + LOGPROB_ROWS
            found = self._numbers(state.pooling, hidden[at:end])
            yield DeviceValues(found.view(torch.int32), partial(_take_rows, state, extras if end >= len(hidden) else None))

    def _numbers(self, pooling: PoolingParams, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size] -> [N, labels] or [N, dimensions] fp32."""
        if pooling.task in ("classify", "token_classify"):
            return self._model.classify(hidden)
        project = self._model.project_tokens if pooling.task == "token_embed" else self._model.project
        vectors = project(hidden.float())[:, : pooling.dimensions]
        return torch.nn.functional.normalize(vectors, dim=1) if pooling.normalize else vectors.contiguous()

    def _prompt_logprobs(
        self, state: SlotState, hidden: torch.Tensor, slot: int, start: int, extras: RowExtras
    ) -> Iterator[DeviceValues]:
        """Position p's hidden state gives the log probability of token p + 1; the last prompt token's belongs to the output."""
        assert state.sampling is not None and state.sampling.prompt_logprobs is not None
        most, extras.prompt_logprobs = state.sampling.prompt_logprobs, []
        count = min(start + len(hidden), state.num_prompt - 1) - start
        following = self._send(self._batch.tokens[slot, start + 1 : start + 1 + count].astype(np.int64))
        for at in range(0, count, LOGPROB_ROWS):
            part = slice(at, min(at + LOGPROB_ROWS, count))
            logits = self._model.logits(hidden[part])
            yield DeviceValues(scores(logits, following[part], most), partial(_take_prompt_logprobs, extras, most))


def _take_prompt_logprobs(extras: RowExtras, most: int, found: torch.Tensor) -> None:
    assert extras.prompt_logprobs is not None
    extras.prompt_logprobs += read_scores(found, [most] * len(found))


def _take_vector(extras: RowExtras, found: torch.Tensor) -> None:
    extras.pooled = _packed(found)


def _take_sparse(extras: RowExtras, found: torch.Tensor) -> None:
    """Takes the ids of the tokens that have a weight, and the weights behind these."""
    ids = found.view(torch.float32).nonzero().flatten()
    extras.pooled = _packed(ids.int()) + _packed(found[ids])


def _take_rows(state: SlotState, extras: RowExtras | None, found: torch.Tensor) -> None:
    state.token_rows.append(_packed(found))
    if extras is not None:
        extras.pooled = b"".join(state.token_rows)


def _packed(found: torch.Tensor) -> bytes:
    """Returns floats, viewed as int32, as `token_packing` has them."""
    return found.numpy().astype("<i4", copy=False).tobytes()


def _pool(state: SlotState, hidden: torch.Tensor, start: int, *, done: bool) -> torch.Tensor | None:
    """Returns [hidden_size] fp32. Pools over chunks: `state.pooled` holds the running sum, or the first token's state."""
    assert state.pooling is not None
    kind = state.pooling.pooling
    if kind == "mean":
        chunk = hidden.float().sum(dim=0)
        state.pooled = chunk if state.pooled is None else state.pooled + chunk
    elif kind == "cls" and start == 0:
        state.pooled = hidden[0].to(torch.float32, copy=True)
    if not done:
        return None
    vector = hidden[-1].float() if kind == "last" else state.pooled
    assert vector is not None
    if kind == "mean":
        vector = vector / (start + len(hidden))
    return vector
