"""Parts of sums over ranks that nobody has made yet: who goes on with one may make more than the sum in a launch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.parallel.communicator import Communicator


@runtime_checkable
class NormsSums(Protocol):
    """A communicator that can make a sum, add it to the residual and take the norm of that in one launch."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RowNorm, rounding: RowRounding | None
    ) -> torch.Tensor | RoundedRows | None:
        """Adds the ranks' sum of x [T, size] to the residual, in place, and returns its norm, rounded if asked for.

        Overwrites x. Returns None, and does nothing, on all ranks alike, where x is not for that.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankPart:
    """This rank's part of rows [T, size], which in `dtype` are the sum over `ranks`. Summed or normed once, by all of them."""

    part: torch.Tensor
    ranks: Communicator
    dtype: torch.dtype

    def summed(self) -> torch.Tensor:
        return self.ranks.all_reduce(self.part).to(self.dtype)

    def normed(self, residual: torch.Tensor, norm: RowNorm, rounding: RowRounding | None) -> torch.Tensor | RoundedRows | None:
        """Does as `NormsSums.add_norm`; None where the sum has to be made first."""
        if self.part.dtype != residual.dtype or not isinstance(self.ranks, NormsSums):
            return None
        return self.ranks.add_norm(self.part, residual, norm, rounding)


Rows = torch.Tensor | RankPart
"""Rows [T, size], or this rank's part of them."""


def whole(rows: Rows) -> torch.Tensor:
    """Returns the rows, summed over ranks where they were not."""
    return rows.summed() if isinstance(rows, RankPart) else rows


def added(rows: Rows, others: Rows, add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Rows:
    """Adds others to rows by `add`, in place. Parts of sums over the same ranks become a part of one sum."""
    if isinstance(rows, RankPart) and isinstance(others, RankPart) and rows.ranks is others.ranks:
        return RankPart(add(rows.part, others.part), rows.ranks, rows.dtype)
    return add(whole(rows), whole(others))
