"""The vocabulary, split over ranks."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from starling_engine.parallel.communicator import Communicator

Lookup = Callable[[torch.Tensor], torch.Tensor]
"""ids [T] int64, counted from the first row that this rank holds -> rows [T, hidden_size]."""


class Vocabulary:
    """Splits the rows of embedding and head over ranks, and makes their outputs whole (arXiv 1909.08053, section 3)."""

    def __init__(self, size: int, ranks: Communicator) -> None:
        self.share = ranks.shard.rounded(size)
        self._width = ranks.shard.rounded_size(size)
        self._ranks = ranks

    @property
    def is_whole(self) -> bool:
        """Says whether this rank has all rows."""
        return self._ranks.shard.count == 1

    def lookup(self, local: Lookup) -> Lookup:
        """Returns a lookup of any id, with the same result on all ranks. `local` looks up this rank's rows."""
        if self.is_whole:
            return local
        first, size = self.share.start, self.share.size

        def whole(ids: torch.Tensor) -> torch.Tensor:
            here = (ids >= first) & (ids < first + size)
            rows = local((ids - first).clamp_(0, size - 1))
            part = rows.to(self._ranks.part_dtype(rows.dtype)).masked_fill(~here[:, None], 0.0)
            return self._ranks.all_reduce(part).to(rows.dtype)

        return whole

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Joins this rank's logits [S, share] fp32 with the others' -> [S, vocab_size], contiguous, the same on all ranks."""
        if self.is_whole:
            return logits
        padded = F.pad(logits, (0, self._width - self.share.size))
        parts = self._ranks.all_gather(padded)
        return parts.transpose(0, 1).flatten(1)[:, : self.share.whole].contiguous()
