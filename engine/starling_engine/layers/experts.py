"""The experts of one layer, with their weights' storage behind one seam, as `layers/linear.py` has it for a matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal, Protocol

import numpy as np
import torch

from starling_engine.errors import ConfigError
from starling_engine.topology.shard import Share
from starling_engine.weights.slot import Alias, Slot, part_slot

Shard = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Gated MLPs, each [hidden_size] -> [intermediate_size] -> [hidden_size].

    A layer has `num_experts`, and this rank has `slots` places for one of them each. Of every expert it has the share
    `intermediate`: with less than all, what comes out is one of several parts of a sum.
    """

    num_experts: int
    slots: int
    hidden_size: int
    intermediate: Share

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
    """One tensor that a method wants of each expert: matrix `shard`, named `name` after the module ("weight").

    `shares` is what it wants of each dimension of the checkpoint's tensor.
    """

    shard: Shard
    name: str
    shares: tuple[Share, ...]


class ExpertsMethod(Protocol):
    """How the experts of one layer are stored and multiplied. Each `Experts` has a method object of its own.

    `create` comes first. An expert can be used when all parts of its slot are loaded. Slots may be loaded, by one thread, while
    another computes with others.
    """

    name: str
    capturable: bool
    """Whether `apply` asks nothing of the host, so that it can be recorded and replayed."""

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        """Names the parts of an expert. Allocates nothing yet."""
        ...

    def load_shard(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Copies the part in, converting to the method's dtype. Memory of slots that were never loaded is not taken."""
        ...

    def release(self, slot: int) -> None:
        """What was loaded into the slot, all of it or a part, is of no use any more."""
        ...

    def memory(self, slot: int) -> list[torch.Tensor]:
        """All that is kept of the expert in a slot, as the method keeps it: contiguous tensors, alike for every slot, that stay
        where they are. A copy of them is the same expert, in a slot of another method of the same name and shape.
        """
        ...

    def apply(self, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Each token's sum of what its experts make of it, times their weights.

        x [T, hidden_size], its rows may be strided; slots [T, top_k] int64, those of a token distinct, or `shape.slots` for an
        expert that is not here and adds nothing; weights [T, top_k] fp32 -> [T, hidden_size] in x's dtype.
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
    """The experts of one layer: their checkpoint tensors on one side, their method on the other.

    Those that are here may change while it computes with others: one thread takes and loads, the one that computes drops, and any
    thread reads.
    """

    def __init__(
        self, names: ExpertNames, shape: ExpertsShape, method: ExpertsMethod, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.method = method
        self._names = names
        self._parts = method.create(shape, dtype, device)
        self._free = [*reversed(range(shape.slots))]
        self._taken: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._here: dict[int, int] = {}
        """By expert that is loaded, a number that no other loading has."""
        self._loadings = count()
        # One more, so that expert -1 has a place in it too.
        self._slot_of = torch.full((shape.num_experts + 1,), shape.slots, dtype=torch.int64, device=device)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `ExpertsMethod.apply`, with the numbers of experts in place of slots; those that are elsewhere add nothing, and so
        does -1.
        """
        return self.method.apply(x, self._slot_of[ids], weights)

    def take(self, expert: int) -> dict[str, Slot]:
        """Keeps a slot for an expert, and gives what is to be loaded. It is here from when all of that is.

        Raises ConfigError when all slots are taken.
        """
        if expert not in self._taken:
            if not self._free:
                raise ConfigError(f"no free slot for expert {expert}: all {self.shape.slots} of the rank are taken")
            self._taken[expert] = self._free.pop()
            self._missing[expert] = len(self._parts)
        return {self._name(expert, part): self._slot(expert, part) for part in self._parts}

    def drop(self, expert: int) -> None:
        """Frees its slot, also of one that is not loaded, or only in part. No token may be sent to it any more."""
        self._here.pop(expert, None)  # first, for those that read it
        self._slot_of[expert] = self.shape.slots
        self._missing.pop(expert, None)
        slot = self._taken.pop(expert)
        self.method.release(slot)
        self._free.append(slot)

    def has(self, expert: int) -> bool:
        """Whether it is here, with all its parts."""
        return expert in self._here

    @property
    def taken(self) -> frozenset[int]:
        """The experts that have a slot."""
        return frozenset(self._taken)

    @property
    def here(self) -> frozenset[int]:
        """The experts that are loaded."""
        return frozenset(self._here)

    # ---- experts as they are kept ----

    @property
    def layout(self) -> str:
        """What an expert is kept as. Ranks of which this is the same can copy each other's."""
        share = self.shape.intermediate
        kept = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in self.method.memory(0))
        return f"{self.method.name}: {kept}; {share.start} to {share.start + share.size} of {share.whole}"

    @property
    def bytes_each(self) -> int:
        """That an expert takes."""
        return sum(tensor.nbytes for tensor in self.method.memory(0))

    def place(self, expert: int) -> list[torch.Tensor]:
        """Keeps a slot, as `take`, and gives its memory, flat, as bytes, to be filled with another rank's; then `arrive`."""
        self.take(expert)
        self.method.release(self._taken[expert])
        return _as_bytes(self.method.memory(self._taken[expert]))

    def arrive(self, expert: int) -> None:
        """All is there that it takes to use the expert."""
        self._missing.pop(expert, None)
        self._here[expert] = next(self._loadings)
        self._slot_of[expert] = self._taken[expert]

    def read(self, expert: int, part: int, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """A copy of some bytes of one of an expert's tensors; None where it is not here, or went meanwhile.

        Nobody waits for who reads: whether the expert was here all the time is looked at afterwards. Raises IndexError for a tensor
        that there is not.
        """
        loading, slot = self._here.get(expert), self._taken.get(expert)
        if loading is None or slot is None:
            return None
        copied = _as_bytes(self.method.memory(slot))[part][start:stop].cpu().numpy().copy()
        return copied if self._here.get(expert) == loading else None

    def _name(self, expert: int, part: ExpertPart) -> str:
        gate, up, down = self._names.shards
        module = {"gate": gate, "up": up, "down": down}[part.shard]
        return f"{self._names.prefix}.{expert}.{module}.{part.name}"

    def _slot(self, expert: int, part: ExpertPart) -> Slot:
        return part_slot(part.shares, partial(self._load, expert, part), self._alias(expert, part))

    def _alias(self, expert: int, part: ExpertPart) -> Alias:
        shape, fused = self.shape, self._names.fused
        experts, hidden, share = shape.num_experts, shape.hidden_size, shape.intermediate
        if part.shard == "down":
            return Alias(f"{fused}.down_proj", (experts, hidden, share.whole), (expert, slice(None), share.slice))
        first = share.start + (share.whole if part.shard == "up" else 0)
        return Alias(f"{fused}.gate_up_proj", (experts, 2 * share.whole, hidden), (expert, slice(first, first + share.size)))

    def _load(self, expert: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        self.method.load_shard(self._taken[expert], part, tensor)
        self._missing[expert] -= 1
        if not self._missing[expert]:
            self.arrive(expert)


def _as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory."""
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]


def plain_parts(shape: ExpertsShape) -> list[ExpertPart]:
    """The parts of a method that wants every matrix as it stands in the checkpoint."""
    shards: tuple[Shard, ...] = ("gate", "up", "down")
    return [ExpertPart(shard, "weight", shape.shard(shard)) for shard in shards]


@dataclass(frozen=True, slots=True)
class Grouping:
    """A step's pairs of token and expert, sorted by the expert's slot, so that each expert's tokens are neighbours.

    There are S of them: T * top_k where all experts are here.

    starts   [slots + 1] int64: the pairs of slot s are [starts[s], starts[s + 1])
    tokens   [S] int64: the token of each pair
    order    [S] int64: where each pair stands in the [T, top_k] that it was sorted from
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor


def group_by_slot(slots: torch.Tensor, count: int) -> Grouping:
    """slots [T, top_k] int64, of `count`; pairs of slot `count` are left out.

    Stable: an expert's tokens stay in order, so that its sums do not depend on the other experts.
    """
    flat = slots.flatten()
    starts = torch.zeros(count + 1, dtype=torch.int64, device=slots.device)
    torch.cumsum(torch.bincount(flat, minlength=count)[:count], 0, out=starts[1:])
    order = flat.argsort(stable=True)[: int(starts[-1])]
    return Grouping(starts, order // slots.shape[1], order)
