"""Sampling: adjusts logits, draws tokens, and gives log probabilities to requests that want them."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.sampling.logprobs import logprob_rows
from starling_engine.sampling.select import SampleOp
from starling_engine.step import RowResult
from starling_engine.worker.host.batch import InputBatch


class Sampler:
    """Stateless between steps: random numbers depend on a request's (seed, position) alone."""

    def __init__(self, op: SampleOp) -> None:
        self._op = op

    def sample(self, logits: torch.Tensor, batch: InputBatch, slots: Sequence[int], ends: npt.NDArray[np.int64]) -> list[RowResult]:
        """Draws a token for each row of logits [R, vocab] fp32 (changed in place).

        `ends[r]` is the position of the new token. A row whose logits are not finite gets an error instead of a token.
        """
        raw = adjust_rows(logits, batch, slots, ends)
        index = np.array(slots)
        chosen = self._op(
            logits,
            batch.sampling_metadata.map(lambda column: torch.from_numpy(column[index])),
            torch.from_numpy(batch.seed[index]),
            torch.from_numpy(ends),
        )
        batch.tokens[index, ends] = chosen.numpy()
        rows = [RowResult() for _ in slots]
        fill_in(rows, chosen.tolist(), are_finite(logits, chosen).tolist())
        add_logprobs(rows, logits, raw, chosen, batch, slots)
        return rows


def adjust_rows(
    logits: torch.Tensor, batch: InputBatch, slots: Sequence[int], ends: npt.NDArray[np.int64]
) -> dict[int, torch.Tensor]:
    """Adjusts the rows that have an adjuster; returns copies, by row, of those whose log probabilities are wanted."""
    raw: dict[int, torch.Tensor] = {}
    for r, slot in enumerate(slots):
        if slot in batch.extra_slots and (state := batch.slot_state(slot)).adjuster is not None:
            if state.sampling is not None and state.sampling.logprobs is not None:
                raw[r] = logits[r].clone()
            state.adjuster.adjust(logits[r], batch.tokens[slot, : ends[r]])
    return raw


def are_finite(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns [R] bool. In a row with a logit that is not finite, such a one was chosen."""
    return torch.isfinite(logits.gather(1, chosen[:, None])[:, 0])


def fill_in(rows: Iterable[RowResult], tokens: list[int], finite: Sequence[bool]) -> None:
    """Sets each row's token, or an error instead."""
    for row, token, good in zip(rows, tokens, finite, strict=True):
        if good:
            row.tokens = [token]
        else:
            row.error = "the model gave no finite logit to choose from"


def add_logprobs(
    rows: list[RowResult],
    logits: torch.Tensor,
    raw: dict[int, torch.Tensor],
    chosen: torch.Tensor,
    batch: InputBatch,
    slots: Sequence[int],
) -> None:
    """Adds log probabilities to the rows that want them. `raw` comes from `adjust_rows`."""
    for r, slot in enumerate(slots):
        if (
            slot in batch.extra_slots
            and (sampling := batch.slot_state(slot).sampling) is not None
            and sampling.logprobs is not None
        ):
            rows[r].logprobs = logprob_rows(raw.get(r, logits[r])[None], chosen[r : r + 1], [sampling.logprobs])
