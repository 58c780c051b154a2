"""y = x W^T + b, with the weights' storage behind one seam.

Quantization, LoRA, tensor parallel slices and packed CPU weights are each a `LinearMethod`; `Linear` knows only which tensors of
a checkpoint make up the matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from starling_engine.topology.shard import Share
from starling_engine.weights.slot import Slot, part_slot


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A matrix [sum(out_sizes), in_size] whose rows come from several checkpoint modules, stacked: q, k, v or gate, up.

    names   the modules, as the checkpoint calls them
    outs    the rows of each that this rank holds, and `ins` the columns: with all rows and some columns, its product is one of
            several that have to be added up
    lookup  the rows are also read one by one, as the embedding that is tied to the logits head
    gated   of two modules as large as each other: silu of the first one's product times the second's is what comes out
    exact   the fp32 product is wanted as it is summed, not rounded to the weights' dtype on its way: a router's, whose near ties
            would fall otherwise
    """

    names: tuple[str, ...]
    outs: tuple[Share, ...]
    ins: Share
    bias: bool = False
    lookup: bool = False
    gated: bool = False
    exact: bool = False

    @property
    def out_sizes(self) -> tuple[int, ...]:
        return tuple(share.size for share in self.outs)

    @property
    def in_size(self) -> int:
        return self.ins.size

    @property
    def out_size(self) -> int:
        """Rows of the matrix."""
        return sum(self.out_sizes)

    def rows(self, shard: int) -> slice:
        """Rows of the whole matrix that module `shard` fills."""
        start = sum(self.out_sizes[:shard])
        return slice(start, start + self.out_sizes[shard])


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One tensor that a method wants for module `shard`, named `name` after the module ("weight", "bias").

    `shares` is what it wants of each dimension of the checkpoint's tensor.
    """

    shard: int
    name: str
    shares: tuple[Share, ...]


class LinearMethod(Protocol):
    """How one matrix is stored and multiplied. Each `Linear` has a method object of its own.

    The calls come in this order: `create` once, `load_shard` for each part that it named, `finish` once, then `apply`.
    """

    name: str

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        """Names the parts to load. Allocates nothing yet: memory must not be taken for layers whose turn has not come."""
        ...

    def load_shard(self, part: LinearPart, tensor: torch.Tensor) -> None:
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


AddUp = Callable[[torch.Tensor], torch.Tensor]
"""See `Communicator.all_reduce`."""

MethodSelector = Callable[[LinearShape], LinearMethod]
"""Chooses the method of one matrix."""


class Linear:
    """One matrix of the model: its checkpoint tensors on one side, its method on the other.

    `add_up` sums, in fp32, the products of the ranks that hold some columns each; None where this rank holds them all.
    """

    def __init__(
        self, shape: LinearShape, method: LinearMethod, dtype: torch.dtype, device: torch.device, add_up: AddUp | None = None
    ) -> None:
        self.shape = shape
        self.method = method
        self._parts = method.create(shape, dtype, device)
        self._missing = len(self._parts)
        self._add_up = add_up
        self.forward = method.apply if add_up is None else self._summed

    def slots(self) -> dict[str, Slot]:
        return {self._name(part): part_slot(part.shares, partial(self._load, part)) for part in self._parts}

    def _name(self, part: LinearPart) -> str:
        return f"{self.shape.names[part.shard]}.{part.name}"

    def _summed(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        assert self._add_up is not None
        return self._add_up(self.method.apply(x, torch.float32)).to(out_dtype or x.dtype)

    def _load(self, part: LinearPart, tensor: torch.Tensor) -> None:
        self.method.load_shard(part, tensor)
        self._missing -= 1
        # At once, not when the whole model is loaded: a method that packs holds both forms of one matrix only.
        if not self._missing:
            self.method.finish()


def stacked(
    names: Sequence[str],
    outs: Sequence[int | Share],
    ins: int | Share,
    bias: bool = False,
    *,
    lookup: bool = False,
    gated: bool = False,
    exact: bool = False,
) -> LinearShape:
    """A plain number is a dimension that this rank holds whole."""
    return LinearShape(tuple(names), tuple(map(_share, outs)), _share(ins), bias, lookup, gated, exact)


def _share(size: int | Share) -> Share:
    return size if isinstance(size, Share) else Share.all(size)
