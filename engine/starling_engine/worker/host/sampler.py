"""Sampling: adjusts logits, draws tokens, accepts drafts, and gives log probabilities to requests that want them."""

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.sampling.logprobs import logprob_rows
from starling_engine.sampling.select import SampleOp
from starling_engine.step import StepResult
from starling_engine.token_packing import pack_tokens
from starling_engine.worker.host.batch import InputBatch, Ints, Samples
from starling_engine.worker.masks import Masked, apply_masks

NOT_FINITE = "the model gave no finite logit to choose from"


class Sampler:
    """Stateless between steps: random numbers depend on a request's (seed, position) alone."""

    def __init__(self, op: SampleOp) -> None:
        self._op = op

    def sample(self, logits: torch.Tensor, batch: InputBatch, samples: Samples, masked: Masked | None, result: StepResult) -> None:
        """Draws a token for each row of logits [S, vocab] fp32 (changed in place); fills in `result`."""
        raw = adjust_rows(logits, batch, samples, masked)
        chosen = self._op(
            logits,
            batch.sampling_metadata.map(lambda column: torch.from_numpy(column[samples.slots])),
            torch.from_numpy(batch.seed[samples.slots]),
            torch.from_numpy(samples.ends),
        )
        tokens = chosen.numpy()
        accepted = samples.accepted(tokens == batch.tokens[samples.slots, samples.ends])
        batch.accept(samples, accepted, tokens)
        fill_in(result, samples, tokens, are_finite(logits, chosen).numpy(), accepted)
        add_logprobs(result, logits, raw, chosen, batch, samples)


def adjust_rows(logits: torch.Tensor, batch: InputBatch, samples: Samples, masked: Masked | None = None) -> dict[int, torch.Tensor]:
    """Adjusts and masks the samples for which that is asked.

    Returns copies, by sample, of those whose log probabilities are wanted.
    """
    raw: dict[int, torch.Tensor] = {}
    at_masked = set(masked.at.tolist()) if masked is not None else set()
    for at, slot in _with_extras(batch, samples):
        state = batch.slot_state(slot)
        if (state.adjuster is not None or at in at_masked) and state.sampling is not None and state.sampling.logprobs is not None:
            raw[at] = logits[at].clone()
        if state.adjuster is not None:
            state.adjuster.adjust(logits[at], batch.tokens[slot, : samples.ends[at]])
    if masked is not None:
        at_rows = torch.from_numpy(masked.at)
        logits[at_rows] = apply_masks(logits[at_rows], masked.words)
    return raw


def are_finite(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns [S] bool. In a row with a logit that is not finite, such a one was chosen."""
    return torch.isfinite(logits.gather(1, chosen[:, None])[:, 0])


def fill_in(
    result: StepResult, samples: Samples, chosen: npt.NDArray[np.int64], finite: npt.NDArray[np.bool_], accepted: Ints
) -> None:
    """Sets the rows' tokens, or an error for a row where one of them has no finite logit; a row that has an error gets none.

    `chosen` [S] are the sampled tokens; of those behind a draft, only the ones behind the `accepted` [R] drafts of a row count.
    """
    counts = dict(zip(samples.rows, (1 + accepted).tolist(), strict=True))
    kept = samples.kept(accepted)
    if result.extras or not finite[kept].all():
        for row, first in zip(samples.rows, samples.first.tolist(), strict=True):
            failed = row in result.extras and result.extras[row].error is not None
            if not failed and not finite[first : first + counts[row]].all():
                result.extras_of(row).error = NOT_FINITE
                failed = True
            if failed:
                kept = kept[(kept < first) | (kept >= first + counts.pop(row))]
    for row, count in counts.items():
        result.counts[row] = count
    result.tokens = pack_tokens(chosen[kept].tolist())


def add_logprobs(
    result: StepResult,
    logits: torch.Tensor,
    raw: dict[int, torch.Tensor],
    chosen: torch.Tensor,
    batch: InputBatch,
    samples: Samples,
) -> None:
    """Adds log probabilities to the rows that want them. `raw` comes from `adjust_rows`."""
    if not batch.extra_slots:
        return
    for row, first in zip(samples.rows, samples.first.tolist(), strict=True):
        sampling = batch.slot_state(int(samples.slots[first])).sampling
        if sampling is not None and sampling.logprobs is not None:
            result.extras_of(row).logprobs = [
                scores
                for at in range(first, first + result.counts[row])
                for scores in logprob_rows(raw.get(at, logits[at])[None], chosen[at : at + 1], [sampling.logprobs])
            ]


def _with_extras(batch: InputBatch, samples: Samples) -> list[tuple[int, int]]:
    """Returns number and slot of the samples that need more than plain sampling."""
    if not batch.extra_slots:
        return []
    return [(at, slot) for at, slot in enumerate(samples.slots.tolist()) if slot in batch.extra_slots]
