"""The experts of one layer, with their weights' storage behind one seam, as `layers/linear.py` has it for a matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch

from starling_engine.parallel.shard import Share
from starling_engine.weights.slot import Alias, Slot, part_slot

Shard = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Gated MLPs, each [hidden_size] -> [intermediate_size] -> [hidden_size].

    This rank holds the share `experts` of them, and of each the share `intermediate`: with less than all of either, what comes out
    is one of several parts of a sum.
    """

    experts: Share
    hidden_size: int
    intermediate: Share

    @property
    def num_experts(self) -> int:
        """That this rank holds."""
        return self.experts.size

    @property
    def intermediate_size(self) -> int:
        """Of this rank's share."""
        return self.intermediate.size

    def shard(self, shard: Shard) -> tuple[Share, Share]:
        """What is wanted of each dimension of one expert's matrix."""
        hidden = Share.all(self.hidden_size)
        return (hidden, self.intermediate) if shard == "down" else (self.intermediate, hidden)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor that a method wants: matrix `shard` of expert `expert`, of all, named `name` after the module ("weight").

    `shares` is what it wants of each dimension of the checkpoint's tensor.
    """

    expert: int
    shard: Shard
    name: str
    shares: tuple[Share, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(share.size for share in self.shares)


class ExpertsMethod(Protocol):
    """How the experts of one layer are stored and multiplied. Each `Experts` has a method object of its own.

    The calls come in this order: `create` once, `load_shard` for each part that it named (in any order), `finish` once, `apply`.
    """

    name: str

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        """Names the parts to load, one expert after another. Allocates nothing yet."""
        ...

    def load_shard(self, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Copies the part in, converting to the method's dtype."""
        ...

    def finish(self) -> None:
        """All parts are there."""
        ...

    def apply(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each token's sum of what its experts make of it, times their weights.

        x [T, hidden_size], ids [T, top_k] int64, weights [T, top_k] fp32 -> [T, hidden_size] in x's dtype. The ids of a token are
        distinct.
        """
        ...


ExpertsSelector = Callable[[ExpertsShape], ExpertsMethod]
"""Chooses the method of one layer's experts."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Where a checkpoint keeps the experts of one layer.

    prefix   expert n is the module `prefix`.n, and `shards` are its gate, up and down
    fused    where transformers keeps all of them as two tensors: gate and up [E, 2 I, H], down [E, H, I]
    """

    prefix: str
    shards: tuple[str, str, str]
    fused: str


class Experts:
    """The experts of one layer: their checkpoint tensors on one side, their method on the other."""

    def __init__(
        self, names: ExpertNames, shape: ExpertsShape, method: ExpertsMethod, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.method = method
        self._names = names
        self._parts = method.create(shape, dtype, device)
        self._missing = len(self._parts)
        self.forward = method.apply

    def slots(self) -> dict[str, Slot]:
        return {self._name(part): part_slot(part.shares, partial(self._load, part), self._alias(part)) for part in self._parts}

    def _name(self, part: ExpertPart) -> str:
        gate, up, down = self._names.shards
        module = {"gate": gate, "up": up, "down": down}[part.shard]
        return f"{self._names.prefix}.{part.expert}.{module}.{part.name}"

    def _alias(self, part: ExpertPart) -> Alias:
        shape, fused = self.shape, self._names.fused
        experts, hidden, share = shape.experts.whole, shape.hidden_size, shape.intermediate
        if part.shard == "down":
            return Alias(f"{fused}.down_proj", (experts, hidden, share.whole), (part.expert, slice(None), share.slice))
        first = share.start + (share.whole if part.shard == "up" else 0)
        return Alias(f"{fused}.gate_up_proj", (experts, 2 * share.whole, hidden), (part.expert, slice(first, first + share.size)))

    def _load(self, part: ExpertPart, tensor: torch.Tensor) -> None:
        self.method.load_shard(part, tensor)
        self._missing -= 1
        if not self._missing:
            self.method.finish()


def plain_parts(shape: ExpertsShape) -> list[ExpertPart]:
    """The parts of a method that wants every matrix as it stands in the checkpoint."""
    shards: tuple[Shard, ...] = ("gate", "up", "down")
    held = range(shape.experts.start, shape.experts.start + shape.experts.size)
    return [ExpertPart(expert, shard, "weight", shape.shard(shard)) for expert in held for shard in shards]


@dataclass(frozen=True, slots=True)
class Grouping:
    """A step's pairs of token and expert, sorted by expert, so that each expert's tokens are neighbours.

    There are S of them: T * top_k where all experts are here.

    starts   [E + 1] int64: the pairs of expert e are [starts[e], starts[e + 1])
    tokens   [S] int64: the token of each pair
    order    [S] int64: where each pair stands in the [T, top_k] that it was sorted from
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor


def group_by_expert(ids: torch.Tensor, experts: Share) -> Grouping:
    """ids [T, top_k] int64, of all experts; pairs with those that are not in `experts` are left out.

    Stable: an expert's tokens stay in order, so that its sums do not depend on the other experts.
    """
    flat = ids.flatten()
    if experts.size < experts.whole:
        here = (flat >= experts.start) & (flat < experts.start + experts.size)
        flat = torch.where(here, flat - experts.start, experts.size)
    order = flat.argsort(stable=True)
    starts = torch.zeros(experts.size + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(torch.bincount(flat, minlength=experts.size)[: experts.size], 0, out=starts[1:])
    if experts.size < experts.whole:
        order = order[: int(starts[-1])]
    return Grouping(starts, order // ids.shape[1], order)
