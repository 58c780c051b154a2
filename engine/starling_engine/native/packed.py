"""Weights in the layout that the matrix kernel reads, of a linear layer or of a layer's experts."""

from dataclasses import dataclass

from torch import Tensor

BLOCK_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight [n, k] bf16. If gated, the first half of its rows is the gate, the second half is `up`.

    `data` is [ceil(n / 16), k / 2, 16, 2] where the kernels pack it (zeros past n), and [n, k] in the reference. So only the module
    that packed a weight can use it.
    """

    data: Tensor
    n: int
    k: int
    gated: bool = False

    @property
    def width(self) -> int:
        """Columns of the output of `linear`."""
        return self.n // 2 if self.gated else self.n


@dataclass(frozen=True, slots=True)
class PackedExperts(PackedWeight):
    """Weights [n, k] of several experts, which are the first dimension of `data`."""

    def expert(self, index: int) -> PackedWeight:
        """Returns the weight of one expert, in the same memory."""
        return PackedWeight(self.data[index], self.n, self.k, self.gated)
