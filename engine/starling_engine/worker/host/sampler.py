"""Sampling: adjusts logits, draws tokens, accepts drafts, and gives log probabilities to requests that want them."""

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.sampling.logprobs import logprob_rows
from starling_engine.sampling.select import MaskOp, SampleOp
from starling_engine.step import StepResult
from starling_engine.token_packing import pack_tokens
from starling_engine.worker.host.batch import InputBatch, Ints, Samples
from starling_engine.worker.masks import Masked

NOT_FINITE = "the model gave no finite logit to choose from"
NO_TOKEN = (
    "no token is possible: each is forbidden, by the answer's format, allowed_token_ids, banned_token_ids or min_tokens, or has a "
    "logit of -inf"
)


class Sampler:
    """Stateless between steps: random numbers depend on a request's (seed, position) alone."""

    def __init__(self, op: SampleOp, mask_op: MaskOp) -> None:
        self._op = op
        self._mask_op = mask_op

    def sample(self, logits: torch.Tensor, batch: InputBatch, samples: Samples, masked: Masked | None, result: StepResult) -> None:
        """Draws a token for each row of logits [S, vocab] fp32 (changed in place); fills in `result`."""
        raw = adjust_rows(logits, batch, samples, masked)
        if masked is not None:
            self._mask(logits, masked)
        chosen = self._op(
            logits,
            batch.sampling_metadata.map(lambda column: torch.from_numpy(column[samples.slots])),
            torch.from_numpy(batch.seed[samples.slots]),
            torch.from_numpy(samples.ends),
        )
        tokens = chosen.numpy()
        accepted = samples.accepted(tokens == batch.tokens[samples.slots, samples.ends])
        batch.accept(samples, accepted, tokens)
        fill_in(result, samples, tokens, chosen_logits(logits, chosen).numpy(), accepted)
        add_logprobs(result, logits, raw, chosen, batch, samples)

    def _mask(self, logits: torch.Tensor, masked: Masked) -> None:
        """Masks rows of logits. The words are copied, for torch takes only memory that may be written."""
        self._mask_op(logits, torch.from_numpy(masked.at), torch.from_numpy(masked.words.copy()))


def adjust_rows(logits: torch.Tensor, batch: InputBatch, samples: Samples, masked: Masked | None) -> dict[int, torch.Tensor]:
    """Adjusts the samples for which that is asked.

    Returns copies, by sample, of those whose log probabilities are wanted and that are adjusted, or will be masked.
    """
    raw: dict[int, torch.Tensor] = {}
    extras = _with_extras(batch, samples)
    at_masked = set(masked.at.tolist()) if extras and masked is not None else set()
    for at, slot in extras:
        state = batch.slot_state(slot)
        if (state.adjuster is not None or at in at_masked) and state.sampling is not None and state.sampling.logprobs is not None:
            raw[at] = logits[at].clone()
        if state.adjuster is not None:
            state.adjuster.adjust(logits[at], batch.tokens[slot, : samples.ends[at]])
    return raw


def chosen_logits(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns [S] fp32. In a row with NaN or +inf such a one was chosen; -inf only where all are."""
    return logits.gather(1, chosen[:, None])[:, 0]


def fill_in(
    result: StepResult, samples: Samples, chosen: npt.NDArray[np.int64], logits: npt.NDArray[np.float32], accepted: Ints
) -> None:
    """Sets the rows' tokens, or an error for a row where one of them is not possible; a row that has an error gets none.

    `chosen` [S] are the sampled tokens and `logits` theirs; of those behind a draft, only the ones behind the `accepted` [R] drafts
    of a row count.
    """
    counts = dict(zip(samples.rows, (1 + accepted).tolist(), strict=True))
    kept, finite = samples.kept(accepted), np.isfinite(logits)
    if result.extras or not finite[kept].all():
        for row, first in zip(samples.rows, samples.first.tolist(), strict=True):
            own = slice(first, first + counts[row])
            failed = row in result.extras and result.extras[row].error is not None
            if not failed and not finite[own].all():
                broken = logits[own][~finite[own]][0]
                extras = result.extras_of(row)
                extras.allows_nothing = bool(broken == -np.inf)
                extras.error = NO_TOKEN if extras.allows_nothing else NOT_FINITE
                failed = True
            if failed:
                kept = kept[(kept < first) | (kept >= own.stop)]
                counts.pop(row)
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
