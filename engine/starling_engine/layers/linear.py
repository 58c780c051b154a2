"""y = x W^T + b, with the weights' storage behind one seam.

Quantization, LoRA, tensor parallel slices and packed CPU weights are each a `LinearMethod`; `Linear` knows only which tensors of
a checkpoint make up the matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from starling_engine.weights.slot import Slot


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A matrix [sum(out_sizes), in_size] whose rows come from several checkpoint modules, stacked: q, k, v or gate, up.

    names   the modules, as the checkpoint calls them
    lookup  the rows are also read one by one, as the embedding that is tied to the logits head
    gated   of two modules as large as each other: silu of the first one's product times the second's is what comes out
    exact   the fp32 product is wanted as it is summed, not rounded to the weights' dtype on its way: a router's, whose near ties
            would fall otherwise
    """

    names: tuple[str, ...]
    out_sizes: tuple[int, ...]
    in_size: int
    bias: bool = False
    lookup: bool = False
    gated: bool = False
    exact: bool = False

    @property
    def out_size(self) -> int:
        """Rows of the matrix."""
        return sum(self.out_sizes)

    def rows(self, shard: int) -> slice:
        """Rows of the whole matrix that module `shard` fills."""
        start = sum(self.out_sizes[:shard])
        return slice(start, start + self.out_sizes[shard])


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a method wants for module `shard`, named `name` after the module ("weight", "bias")."""

    shard: int
    name: str
    shape: tuple[int, ...]


class LinearMethod(Protocol):
    """How one matrix is stored and multiplied. Each `Linear` has a method object of its own.

    The calls come in this order: `create` once, `load_shard` for each part that it named, `finish` once, then `apply`.
    """

    name: str

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[Part]:
        """Names the parts to load. Allocates nothing yet: memory must not be taken for layers whose turn has not come."""
        ...

    def load_shard(self, part: Part, tensor: torch.Tensor) -> None:
        """Copies the part in, converting to the method's dtype."""
        ...

    def finish(self) -> None:
        """All parts are there: brings them to the form that `apply` reads and frees the rest."""
        ...

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, in_size] -> [T, out_size], or half of that where gated, in `out_dtype` or else in x's dtype."""
        ...

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> rows [T, in_size]. Only for a shape that asks for `lookup`."""
        ...


MethodSelector = Callable[[LinearShape], LinearMethod]
"""Chooses the method of one matrix."""


class Linear:
    """One matrix of the model: its checkpoint tensors on one side, its method on the other."""

    def __init__(self, shape: LinearShape, method: LinearMethod, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.method = method
        self._parts = method.create(shape, dtype, device)
        self._missing = len(self._parts)
        self.forward = method.apply

    def slots(self) -> dict[str, Slot]:
        return {f"{self.shape.names[part.shard]}.{part.name}": Slot(part.shape, partial(self._load, part)) for part in self._parts}

    def _load(self, part: Part, tensor: torch.Tensor) -> None:
        self.method.load_shard(part, tensor)
        self._missing -= 1
        # At once, not when the whole model is loaded: a method that packs holds both forms of one matrix only.
        if not self._missing:
            self.method.finish()


def stacked(
    names: Sequence[str],
    out_sizes: Sequence[int],
    in_size: int,
    bias: bool = False,
    *,
    lookup: bool = False,
    gated: bool = False,
    exact: bool = False,
) -> LinearShape:
    return LinearShape(tuple(names), tuple(out_sizes), in_size, bias, lookup, gated, exact)
