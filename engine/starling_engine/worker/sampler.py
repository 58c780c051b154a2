"""From logits to tokens: adjust, sample, and log probabilities for those who ask."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.sampling.logprobs import logprob_rows
from starling_engine.sampling.select import SampleOp
from starling_engine.step import RowResult
from starling_engine.worker.batch import InputBatch


class Sampler:
    """Stateless between steps: random numbers depend on a request's (seed, position) alone."""

    def __init__(self, op: SampleOp) -> None:
        self._op = op

    def sample(self, logits: torch.Tensor, batch: InputBatch, slots: Sequence[int], ends: npt.NDArray[np.int64]) -> list[RowResult]:
        """One token for each row of logits [R, vocab] fp32 (changed in place).

        `ends[r]` is the position of the new token. A row whose logits are not finite gets an error in place of a token.
        """
        special = [(r, slot, batch.occupant(slot)) for r, slot in enumerate(slots) if slot in batch.special]
        raw = {r: logits[r].clone() for r, _, o in special if o.adjuster and o.sampling and o.sampling.logprobs is not None}
        for r, slot, occupant in special:
            if occupant.adjuster is not None:
                occupant.adjuster.adjust(logits[r], batch.tokens[slot, : ends[r]])
        index = np.array(slots)
        chosen = self._op(
            logits,
            torch.from_numpy(batch.temperature[index]),
            torch.from_numpy(batch.top_k[index]),
            torch.from_numpy(batch.top_p[index]),
            torch.from_numpy(batch.min_p[index]),
            torch.from_numpy(batch.seed[index]),
            torch.from_numpy(ends),
        )
        batch.tokens[index, ends] = chosen.numpy()
        finite = torch.isfinite(logits.gather(1, chosen[:, None])[:, 0])
        rows = [RowResult(tokens=[token]) for token in chosen.tolist()]
        if not finite.all():
            for r in (~finite).nonzero()[:, 0].tolist():
                rows[r] = RowResult(error="the model gave no finite logit to choose from")
        for r, _, occupant in special:
            if occupant.sampling is not None and occupant.sampling.logprobs is not None:
                source = raw.get(r, logits[r])
                rows[r].logprobs = logprob_rows(source[None], chosen[r : r + 1], [occupant.sampling.logprobs])
        return rows
