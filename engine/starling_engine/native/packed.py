"""Weights in the layout that the matrix kernel reads: a linear layer's, and those of a layer's experts."""

from dataclasses import dataclass

from torch import Tensor

BLOCK_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight [n, k] bf16; gated, its rows are a gate's and then as many that it opens.

    `data` is [ceil(n / 16), k / 2, 16, 2] as the kernels pack it (zeros past n), and plainly [n, k] as the reference does: a packed
    weight belongs to the module that made it.
    """

    data: Tensor
    n: int
    k: int
    gated: bool = False

    @property
    def width(self) -> int:
        """Columns of what `linear` makes of it."""
        return self.n // 2 if self.gated else self.n


@dataclass(frozen=True, slots=True)
class PackedExperts(PackedWeight):
    """One such weight [n, k] for each expert: `data` has the experts as its first dimension."""

    def expert(self, index: int) -> PackedWeight:
        """The weight of one expert, in the same memory."""
        return PackedWeight(self.data[index], self.n, self.k, self.gated)
