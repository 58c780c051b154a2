"""Linear layers, y = x W^T + b.

A `LinearMethod` stores and multiplies the weights: dense, packed for a CPU, or another form. `Linear` knows only which tensors of a
checkpoint make up the matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.layers.low_rank import LowRankMatrix
from starling_engine.model_config.adapters import AdapterConfig
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.rank_part import RankPart, Rows, whole
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import Alias, WeightSlot, part_slot


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A matrix [sum(out_sizes), in_size] whose rows come from several checkpoint modules, stacked: q, k, v or gate, up.

    names   the modules, as the checkpoint calls them
    fused   a module in which a checkpoint may hold all of them, one behind the other; empty where none may
    num_fused  the first so many alone are in it; 0: all
    fused_backwards  the last one comes first in it
    repeats  the checkpoint has no tensors of the last module: they are those of the one before
    outs    the rows of each that this rank holds
    ins     the columns that this rank holds: if not all, its product is one of several that have to be added up
    lookup  the rows are also read one by one, as the embedding that is tied to the logits head
    only_lookup  nothing is multiplied: an embedding of its own
    gated   of two equal modules: the output is silu of the first one's product times the second's
    transposed  the checkpoint's tensors have a column for each row of the matrix
    exact   the product is not rounded to the weights' dtype on its way: for a router, whose near ties would fall otherwise
    """

    names: tuple[str, ...]
    outs: tuple[Share, ...]
    ins: Share
    bias: bool = False
    lookup: bool = False
    gated: bool = False
    exact: bool = False
    only_lookup: bool = False
    fused: str = ""
    fused_backwards: bool = False
    num_fused: int = 0
    repeats: bool = False
    transposed: bool = False

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The modules that the checkpoint has these from."""
        return (*self.names[:-1], self.names[-2]) if self.repeats else self.names

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

    def rows(self, module: int) -> slice:
        """Returns the rows of the whole matrix that module `module` of `names` fills."""
        start = sum(self.out_sizes[:module])
        return slice(start, start + self.out_sizes[module])


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One tensor that a method loads for module `module` of `LinearShape.names`, named `name` after the module ("weight", "bias").

    `shares` are the parts that it takes of the dimensions of the checkpoint's tensor, `element_bytes` as in `WeightSlot`. Of one
    with `codes` the method takes what the checkpoint has quantized.
    """

    module: int
    name: str
    shares: tuple[Share, ...]
    element_bytes: float | None = None
    codes: bool = False


class LinearMethod(Protocol):
    """Stores and multiplies one matrix. Each `Linear` has a method object of its own.

    The calls come in this order: `create` once, `load_part` or `load_codes` for each part that it named, `finish` once; `apply`.
    """

    name: str

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        """Names the parts to load. Allocates nothing: layers whose turn has not come take no memory."""
        ...

    def load_part(self, part: LinearPart, tensor: torch.Tensor) -> None:
        """Copies the part in, converting to the method's dtype."""
        ...

    def load_codes(self, part: LinearPart, matrix: GroupQuantized) -> None:
        """Takes a part that has `codes`."""
        ...

    def finish(self) -> None:
        """Brings the parts to the form that `apply` reads, and frees the rest. Called when all are loaded."""
        ...

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, in_size] -> [T, out_size], or half of that where gated, in `out_dtype` or else in x's dtype."""
        ...

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> rows [T, in_size]. Only for a shape that asks for `lookup` or `only_lookup`."""
        ...


@runtime_checkable
class RoundsRows(Protocol):
    """A method that may multiply by rows of FP8: then what comes before may round them, in the launch that makes them."""

    def row_rounding(self) -> RowRounding | None:
        """Says how `apply` rounds rows; None where it does not, or not for all its matrices alike. Known when all is loaded."""
        ...

    def apply(self, x: torch.Tensor | RoundedRows, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """Does as `LinearMethod.apply`, also with rows that are rounded so."""
        ...

    def rounds_gates(self) -> bool:
        """Says whether there is `apply_gated`."""
        ...

    def apply_gated(self, x: torch.Tensor | RoundedRows, to: RowRounding) -> RoundedRows:
        """Does as `apply`, where gated, and rounds the result."""
        ...


@runtime_checkable
class WritesInto(Protocol):
    """A method that can write its product where it is told to."""

    def apply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [T, in_size] -> out [T, out_size] fp32; in one launch where the device sums in fp32."""
        ...


@runtime_checkable
class FusesRows(Protocol):
    """A method that may multiply a few rows in one launch with the norm before them, and the residual behind them."""

    def fused_rows(self) -> int:
        """Returns the most rows for `apply_fused`; 0 where there is none."""
        ...

    def apply_fused(self, x: torch.Tensor, norm: RowNorm | None, add_to: torch.Tensor | None) -> torch.Tensor:
        """Does as `apply` with the norm of x; adds that to `add_to`, in place, and returns it."""
        ...


MethodSelector = Callable[[LinearShape], LinearMethod]
"""Chooses the method of one matrix."""


class Linear:
    """One matrix of the model: its checkpoint tensors on one side, its method on the other.

    `ranks` hold some columns each, and sum their products; None where this rank holds them all. `adapters` are those of the
    checkpoint, if it has any.
    """

    def __init__(
        self,
        shape: LinearShape,
        method: LinearMethod,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Communicator | None = None,
        adapters: AdapterConfig | None = None,
    ) -> None:
        self.shape = shape
        self.method = method
        self._parts = method.create(shape, dtype, device)
        self._missing = len(self._parts)
        self._ranks = ranks
        self.forward = method.apply if ranks is None else self._reduced
        self._rounds = method if isinstance(method, RoundsRows) else None
        self._fuses = method if isinstance(method, FusesRows) else None
        self._adapters: LowRankMatrix | None = None
        if adapters is not None:
            assert not shape.gated, "a gate's product has no room for what adapters add to it"
            self._adapters = LowRankMatrix(adapters, shape.names, shape.fused, shape.outs, shape.ins, dtype, device)
        alone = ranks is None and adapters is None
        self.fused_rows = self._fuses.fused_rows() if alone and self._fuses is not None else 0
        """The most rows for `forward_fused`; 0 where there is none: ranks sum before the residual is added, and so do adapters."""

    @property
    def rounding(self) -> RowRounding | None:
        """The way to round x for `forward_rounded`; None: there is none."""
        return None if self._rounds is None else self._rounds.row_rounding()

    @property
    def gates_rounded(self) -> bool:
        """Says whether there is `forward_gated`."""
        return self._rounds is not None and self._rounds.rounds_gates()

    def forward_fused(self, x: torch.Tensor, norm: RowNorm | None = None, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """Does as `forward` with the norm of x, in one launch. With `add_to` [T, out_size] adds to that, and returns it."""
        assert self._fuses is not None and len(x) <= self.fused_rows
        return self._fuses.apply_fused(x, norm, add_to)

    def forward_rounded(self, x: torch.Tensor | RoundedRows) -> torch.Tensor:
        """Does as `forward`, also with rows that are rounded as `rounding` says."""
        return whole(self.forward_part(x))

    def forward_adapted(self, x: torch.Tensor | RoundedRows, adapters: torch.Tensor | None) -> torch.Tensor:
        """Does as `forward_rounded`, and adds what `adapters` make of x: the `columns` of `LowRankMatrix`, or None."""
        return whole(self.forward_part(x, adapters))

    def forward_part(self, x: torch.Tensor | RoundedRows, adapters: torch.Tensor | None = None) -> Rows:
        """Does as `forward_adapted`, and leaves the sum to the caller, where ranks make one."""
        dtype = None if self._ranks is None else self._ranks.part_dtype(x.dtype)
        if adapters is not None:
            assert self._adapters is not None and isinstance(x, torch.Tensor), "chosen where there are none"
            part = self._adapters.add(self.method.apply(x, dtype), x, adapters)
        elif isinstance(x, torch.Tensor):
            part = self.method.apply(x, dtype)
        else:
            assert self._rounds is not None, "rows are rounded for what takes no such"
            part = self._rounds.apply(x, dtype)
        return part if self._ranks is None else RankPart(part, self._ranks, x.dtype)

    def forward_gated(self, x: torch.Tensor | RoundedRows, to: RowRounding) -> RoundedRows:
        """Does as `forward_rounded`, where gated, and rounds the result."""
        assert self._rounds is not None and self._ranks is None
        return self._rounds.apply_gated(x, to)

    def forward_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Does as `forward`, into out [T, out_size] fp32."""
        if self._ranks is None and isinstance(self.method, WritesInto):
            self.method.apply_into(x, out)
        else:
            out.copy_(self.forward(x, torch.float32 if out.is_cpu else None))  # elsewhere the copy widens

    def weight_slots(self) -> dict[str, WeightSlot]:
        own = {self._name(part): self._slot(part) for part in self._parts}
        return own if self._adapters is None else {**own, **self._adapters.weight_slots()}

    def _slot(self, part: LinearPart) -> WeightSlot:
        load, load_codes = partial(self._load, part), partial(self._load_codes, part) if part.codes else None
        slot = part_slot(part.shares, load, self._alias(part), part.element_bytes, load_codes)
        return replace(slot, transposed=self.shape.transposed and len(part.shares) > 1)

    def _alias(self, part: LinearPart) -> Alias | None:
        """Returns the place of the part in the tensor that a checkpoint may have for all modules, or has for the one before."""
        if self.shape.repeats and part.module == len(self.shape.names) - 1:
            whole, slices = tuple(share.whole for share in part.shares), tuple(share.slice for share in part.shares)
            return Alias((f"{self.shape.stored_names[-1]}.{part.name}",), whole, slices)
        outs = self.shape.outs[: self.shape.num_fused or None]
        if not self.shape.fused or part.module >= len(outs):
            return None
        ahead = outs[part.module + 1 :] if self.shape.fused_backwards else outs[: part.module]
        before = sum(share.whole for share in ahead)
        rows, *columns = part.shares
        whole = (sum(share.whole for share in outs), *(share.whole for share in columns))
        index = (slice(before + rows.start, before + rows.start + rows.size), *(share.slice for share in columns))
        if self.shape.transposed and columns:
            return Alias((f"{self.shape.fused}.{part.name}",), whole[::-1], index[::-1], transposed=True)
        return Alias((f"{self.shape.fused}.{part.name}",), whole, index)

    def _name(self, part: LinearPart) -> str:
        return f"{self.shape.names[part.module]}.{part.name}"

    def _reduced(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        assert self._ranks is not None
        dtype = out_dtype or x.dtype
        return self._ranks.all_reduce(self.method.apply(x, self._ranks.part_dtype(dtype))).to(dtype)

    def _load(self, part: LinearPart, tensor: torch.Tensor) -> None:
        self.method.load_part(part, tensor)
        self._loaded_one()

    def _load_codes(self, part: LinearPart, matrix: GroupQuantized) -> None:
        self.method.load_codes(part, matrix)
        self._loaded_one()

    def _loaded_one(self) -> None:
        self._missing -= 1
        # Not when the whole model is loaded: a method that packs then holds both forms of one matrix only.
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
    only_lookup: bool = False,
    fused: str = "",
    fused_backwards: bool = False,
    num_fused: int = 0,
    repeats: bool = False,
    transposed: bool = False,
) -> LinearShape:
    """Makes a shape. A plain number is a dimension that this rank holds whole."""
    shares = tuple(map(_share, outs))
    return LinearShape(
        *(tuple(names), shares, _share(ins), bias, lookup, gated, exact, only_lookup, fused),
        fused_backwards=fused_backwards,
        num_fused=num_fused,
        repeats=repeats,
        transposed=transposed,
    )


def _share(size: int | Share) -> Share:
    return size if isinstance(size, Share) else Share.all(size)
