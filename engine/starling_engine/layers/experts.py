"""The experts of one layer. An `ExpertsMethod` stores and multiplies their weights, as a `LinearMethod` does for a matrix."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch

from starling_engine import native
from starling_engine.errors import ConfigError
from starling_engine.model_config.moe import ExpertGate, ExpertLayout
from starling_engine.native import routing_ops
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import Alias, WeightSlot, part_slot

Projection = Literal["gate", "up", "down"]


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """MLPs, each [hidden_size] -> [intermediate_size] -> [hidden_size].

    A layer has `num_experts`, and this rank has `num_slots` expert slots for one of them each. It has the share `intermediate` of
    every expert; if that is less than all, its output is one of several parts of a sum. With `bias` each matrix has one. Without a
    `gate` it is SiLU times up; those that are not `gated` have squares of what is above 0 of up.
    """

    num_experts: int
    num_slots: int
    hidden_size: int
    intermediate: Share
    bias: bool = False
    gate: ExpertGate | None = None
    gated: bool = True

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The matrices of an expert."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    @property
    def up_parts(self) -> int:
        """Matrices before the activation, one behind the other."""
        return 2 if self.gated else 1

    @property
    def intermediate_size(self) -> int:
        """Width of this rank's share."""
        return self.intermediate.size

    def shares(self, projection: Projection) -> tuple[Share, Share]:
        """Returns this rank's share of each dimension of one expert's matrix."""
        hidden = Share.all(self.hidden_size)
        return (hidden, self.intermediate) if projection == "down" else (self.intermediate, hidden)

    def bias_share(self, projection: Projection) -> Share:
        """Returns this rank's share of a bias. Of ranks that have some columns of a matrix each, the first one adds it."""
        if projection != "down":
            return self.intermediate
        return Share.all(self.hidden_size) if self.intermediate.start == 0 else Share(0, 0, self.hidden_size)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor that a method loads for each expert: of matrix `projection`, named `name` after the module ("weight", "bias").

    `shares`, `element_bytes` and `codes` as in `LinearPart`.
    """

    projection: Projection
    name: str
    shares: tuple[Share, ...]
    element_bytes: float | None = None
    codes: bool = False


class ExpertsMethod(Protocol):
    """Stores and multiplies the experts of one layer. Each `Experts` has a method object of its own.

    `create` comes first. An expert can be used when all parts of its slot are loaded. One thread may load slots while another one
    computes with other slots.
    """

    name: str
    capturable: bool
    """True where the host has no part in `apply`, so that a step can be recorded and replayed."""

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        """Names the parts of an expert. Allocates nothing yet."""
        ...

    def load_part(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Copies the part in, converting to the method's dtype. Memory of slots that were never loaded is not taken."""
        ...

    def release(self, slot: int) -> None:
        """Forgets what was loaded into the slot, all of it or a part."""
        ...

    def memory(self, slot: int) -> list[torch.Tensor]:
        """Returns the memory of a slot: contiguous tensors, alike for every slot, that stay where they are.

        A copy of them is the same expert, in a slot of another method of the same name and shape.
        """
        ...

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums each token's experts, times their weights: x [T, hidden_size] -> [T, hidden_size] in x's dtype.

        The rows of x may be strided. expert_slots [T, top_k] int64 are distinct for each token; `shape.num_slots` stands for an
        expert that the rank lacks, and adds nothing. weights [T, top_k] fp32.
        """
        ...


@runtime_checkable
class TakesCodes(Protocol):
    """A method whose parts have `codes`."""

    def load_codes(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        """Does as `load_part` with a matrix that the checkpoint has quantized."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of one layer's experts in a checkpoint.

    prefix   expert n is the module `prefix`.n, and `projections` are its gate, up and down
    fused    names of two tensors that may hold all of them: gate and up [E, 2 I, H], down [E, H, I]
    layout   of these; in columns they are [E, H, 2 I] and [E, I, H]; where both are possible, their shapes tell
    """

    prefix: str
    projections: tuple[str, str, str]
    fused: tuple[tuple[str, ...], tuple[str, ...]]
    layout: ExpertLayout = "rows"

    def weight(self, expert: int, projection: Projection, kind: str = "weight") -> str:
        """Returns the name of an expert's tensor."""
        gate, up, down = self.projections
        return f"{self.prefix}.{expert}.{({'gate': gate, 'up': up, 'down': down})[projection]}.{kind}"


ExpertsSelector = Callable[[ExpertsShape, ExpertNames], ExpertsMethod]
"""Chooses the method of one layer's experts."""


class Experts:
    """The experts of one layer: their checkpoint tensors on one side, their method on the other.

    Experts may come and go while it computes with others: one thread reserves and loads, the one that computes drops, any reads.
    """

    def __init__(
        self, names: ExpertNames, shape: ExpertsShape, method: ExpertsMethod, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.method = method
        self._names = names
        self._parts = method.create(shape, dtype, device)
        self._free = [*reversed(range(shape.num_slots))]
        self._reserved: dict[int, int] = {}
        """Slot of each expert that has one."""
        self._missing: dict[int, int] = {}
        """Parts that each expert still lacks."""
        self._loaded: dict[int, int] = {}
        """Number of the load that brought each expert; each load has another one."""
        self._load_numbers = count()
        # Not where a step can be recorded: what the host computes is in no recording.
        self._looks_up = device.type == "cpu" and not method.capturable and native.load() is not None
        # One more, for the expert -1.
        self._slot_of = torch.full((shape.num_experts + 1,), shape.num_slots, dtype=torch.int64, device=device)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Calls `ExpertsMethod.apply` with the slots of the experts `ids`. Experts that are elsewhere, and -1, add nothing."""
        slots = routing_ops.look_up(self._slot_of, ids.contiguous()) if self._looks_up else self._slot_of[ids]
        return self.method.apply(x, slots, weights)

    def reserve(self, expert: int) -> dict[str, WeightSlot]:
        """Reserves a slot for an expert, and returns its tensors to load. It can be used once all of them are loaded.

        Raises ConfigError when all slots are taken.
        """
        if expert not in self._reserved:
            if not self._free:
                raise ConfigError(f"no free slot for expert {expert}: all {self.shape.num_slots} of the rank are taken")
            self._reserved[expert] = self._free.pop()
            self._missing[expert] = len(self._parts)
        return {self._names.weight(expert, part.projection, part.name): self._slot(expert, part) for part in self._parts}

    def drop(self, expert: int) -> None:
        """Frees its slot, whether it is loaded or not. No token may be sent to it any more."""
        self._loaded.pop(expert, None)  # first, for threads that read it
        self._slot_of[expert] = self.shape.num_slots
        self._missing.pop(expert, None)
        slot = self._reserved.pop(expert)
        self.method.release(slot)
        self._free.append(slot)

    def has(self, expert: int) -> bool:
        """Returns whether all its parts are loaded."""
        return expert in self._loaded

    @property
    def reserved(self) -> frozenset[int]:
        """The experts that have a slot."""
        return frozenset(self._reserved)

    @property
    def loaded(self) -> frozenset[int]:
        """The experts that are loaded with all their parts."""
        return frozenset(self._loaded)

    # ---- copies between ranks ----

    @property
    def layout(self) -> str:
        """Describes an expert's memory. Ranks of the same layout can copy each other's experts."""
        share = self.shape.intermediate
        kept = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in self.method.memory(0))
        return f"{self.method.name}: {kept}; {share.start} to {share.start + share.size} of {share.whole}"

    @property
    def bytes_each(self) -> int:
        """Memory of one expert."""
        return sum(tensor.nbytes for tensor in self.method.memory(0))

    def reserve_memory(self, expert: int) -> list[torch.Tensor]:
        """Reserves a slot, and returns its memory as flat bytes, for a copy of another rank's expert; then comes `mark_loaded`."""
        self.reserve(expert)
        self.method.release(self._reserved[expert])
        return _as_bytes(self.method.memory(self._reserved[expert]))

    def mark_loaded(self, expert: int) -> None:
        self._missing.pop(expert, None)
        self._loaded[expert] = next(self._load_numbers)
        self._slot_of[expert] = self._reserved[expert]

    def read(self, expert: int, part: int, start: int, stop: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """Copies some bytes of one of an expert's tensors. Returns None where it is not loaded, or was dropped meanwhile.

        No lock: it checks afterwards that the expert was here all the time. Raises IndexError for a tensor that does not exist.
        """
        number, slot = self._loaded.get(expert), self._reserved.get(expert)
        if number is None or slot is None:
            return None
        copied = _as_bytes(self.method.memory(slot))[part][start:stop].cpu().numpy().copy()
        return copied if self._loaded.get(expert) == number else None

    def _slot(self, expert: int, part: ExpertPart) -> WeightSlot:
        load = partial(self._load, expert, part)
        load_codes = partial(self._load_codes, expert, part) if part.codes else None
        return part_slot(part.shares, load, self._alias(expert, part), part.element_bytes, load_codes)

    def _alias(self, expert: int, part: ExpertPart) -> Alias:
        layout = self._names.layout
        if layout == "rows":
            return self._in_rows(expert, part)
        tensors = self._names.fused[part.projection == "down"]
        found = _in_columns(tensors, self.shape, expert, part, alternating=layout == "alternating columns")
        return replace(found, other=self._in_rows(expert, part)) if layout == "columns or rows" else found

    def _in_rows(self, expert: int, part: ExpertPart) -> Alias:
        shape, tensors = self.shape, self._names.fused[part.projection == "down"]
        experts, hidden, share = shape.num_experts, shape.hidden_size, shape.intermediate
        if part.projection == "down":
            return Alias(tensors, (experts, hidden, share.whole), (expert, slice(None), share.slice))
        first = share.start + (share.whole if part.projection == "up" else 0)
        return Alias(tensors, (experts, 2 * share.whole, hidden), (expert, slice(first, first + share.size)))

    def _load(self, expert: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        self.method.load_part(self._reserved[expert], part, tensor)
        self._loaded_one(expert)

    def _load_codes(self, expert: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        assert isinstance(self.method, TakesCodes), "its parts have codes"
        self.method.load_codes(self._reserved[expert], part, matrix)
        self._loaded_one(expert)

    def _loaded_one(self, expert: int) -> None:
        self._missing[expert] -= 1
        if not self._missing[expert]:
            self.mark_loaded(expert)


def _in_columns(tensors: tuple[str, ...], shape: ExpertsShape, expert: int, part: ExpertPart, *, alternating: bool) -> Alias:
    """Returns the place of a part where matrices lie with columns first, and gate and up may take turns."""
    experts, hidden, share = shape.num_experts, shape.hidden_size, shape.intermediate
    width, columns = hidden, part.shares[0].slice
    if part.projection != "down":
        second, width = part.projection == "up", 2 * share.whole
        first = share.start + share.whole * second
        columns = slice(first, first + share.size)
        if alternating:
            columns = slice(2 * share.start + second, 2 * (share.start + share.size), 2)
    if part.name == "bias":
        return Alias(tuple(f"{tensor}_bias" for tensor in tensors), (experts, width), (expert, columns))
    return Alias(tensors, (experts, part.shares[1].whole, width), (expert, part.shares[1].slice, columns), transposed=True)


def _as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views the same memory as flat bytes."""
    return [tensor.view(-1).view(torch.uint8) for tensor in tensors]


def plain_parts(shape: ExpertsShape) -> list[ExpertPart]:
    """Returns the parts of a method that takes every matrix as it is in the checkpoint."""
    weights = [ExpertPart(projection, "weight", shape.shares(projection)) for projection in shape.projections]
    biases = [ExpertPart(projection, "bias", (shape.bias_share(projection),)) for projection in shape.projections if shape.bias]
    return weights + biases


@dataclass(frozen=True, slots=True)
class Grouping:
    """A step's pairs of token and expert, sorted by the expert's slot, so that each expert's tokens are neighbours.

    There are S of them: T * top_k where all experts are here.

    starts   [num_slots + 1] int64: the pairs of slot s are [starts[s], starts[s + 1])
    tokens   [S] int64: the token of each pair
    order    [S] int64: each pair's index in the [T, top_k] that it was sorted from
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor


def group_by_slot(expert_slots: torch.Tensor, num_slots: int) -> Grouping:
    """Sorts pairs by slot. expert_slots [T, top_k] int64 are below `num_slots`; pairs with `num_slots` itself are left out.

    Stable: an expert's tokens stay in order, so that its sums do not depend on the other experts.
    """
    flat = expert_slots.flatten()
    starts = torch.zeros(num_slots + 1, dtype=torch.int64, device=expert_slots.device)
    torch.cumsum(torch.bincount(flat, minlength=num_slots)[:num_slots], 0, out=starts[1:])
    order = flat.argsort(stable=True)[: int(starts[-1])]
    return Grouping(starts, order // expert_slots.shape[1], order)
