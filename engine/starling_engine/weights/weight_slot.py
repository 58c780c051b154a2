"""A weight slot of a model is filled by one tensor of a checkpoint. Weight slots are all that the loader knows of a model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.topology.shard import Share


@dataclass(frozen=True, slots=True)
class Alias:
    """Another tensor that may hold a slot's values: at `index` of one named in `tensors`, which has `shape`.

    Its rows are the slot's columns if it is `transposed`. Where the tensor has the shape of `other`, that one holds.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    transposed: bool = False
    other: "Alias | None" = None


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Takes this rank's part of a tensor.

    shape  of the whole tensor
    load   copies the part into the model and its form, once; its argument may be a memory map that is closed right after
    part   slices of the dimensions, from the first on; dimensions without a slice are whole
    alias  another tensor that may hold the part
    element_bytes   what the model keeps of an element; None: as many bytes as its dtype has
    load_codes      does as `load` with a matrix that the checkpoint has quantized; None where the model wants numbers
    transposed      the tensor's rows are the matrix's columns
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], object]
    part: tuple[slice, ...] = ()
    alias: Alias | None = None
    element_bytes: float | None = None
    load_codes: Callable[[GroupQuantized], None] | None = None
    transposed: bool = False

    def held_bytes(self, itemsize: int) -> int:
        """Returns the bytes that the model keeps of the part, if its dtype has `itemsize`."""
        return int(math.prod(self.local_shape) * (itemsize if self.element_bytes is None else self.element_bytes))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        ends = [each.indices(size) for each, size in zip(self.part, self.shape, strict=False)]
        return (*(stop - start for start, stop, _ in ends), *self.shape[len(ends) :])


class Loadable(Protocol):
    """A model that can be filled from a checkpoint."""

    def weight_slots(self) -> Mapping[str, WeightSlot]:
        """Returns weight slots by tensor name, in the order in which the model uses them. Every one must be loaded."""
        ...

    def duplicates(self) -> Mapping[str, str]:
        """Returns tensors that a checkpoint may hold as well (tied weights saved twice), and the slot that each must equal."""
        ...

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor without a slot is harmless."""
        ...


class WeightSource(Protocol):
    """Loads weights after the start, too."""

    def fill(self, slots: Mapping[str, WeightSlot]) -> None:
        """Loads every slot."""
        ...


def copy_slot(target: torch.Tensor) -> WeightSlot:
    """Returns the slot that fills `target`."""
    return part_copy_slot([Share.all(size) for size in target.shape], target)


def part_copy_slot(shares: Sequence[Share], target: torch.Tensor) -> WeightSlot:
    """Returns the slot that fills `target` with `shares` of the dimensions of a tensor."""

    def load(tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    return part_slot(shares, load)


def plus_one_slot(target: torch.Tensor) -> WeightSlot:
    """Returns the slot that fills `target` with 1 + the tensor, in the target's dtype."""

    def load(tensor: torch.Tensor) -> None:
        target.copy_(tensor).add_(1)

    return WeightSlot(tuple(target.shape), load, element_bytes=target.itemsize)


def scaled_slot(target: torch.Tensor, scale: float) -> WeightSlot:
    """Returns the slot that fills `target` with the tensor times `scale`, in the target's dtype."""

    def load(tensor: torch.Tensor) -> None:
        target.copy_(tensor).mul_(scale)

    return WeightSlot(tuple(target.shape), load, element_bytes=target.itemsize)


def in_row_order(slot: WeightSlot, order: torch.Tensor) -> WeightSlot:
    """Returns a slot that takes the part's rows in an `order` of its own, [rows] int64."""
    load_codes = slot.load_codes
    return replace(
        slot,
        load=lambda tensor: slot.load(tensor[order]),
        load_codes=None if load_codes is None else lambda matrix: load_codes(matrix.rows(order)),
    )


def also_below(slots: Mapping[str, WeightSlot], module: str, other: str) -> dict[str, WeightSlot]:
    """Returns the slots of tensors that a checkpoint may have below the module `other` in place of `module`."""
    named = {name: f"{other}{name.removeprefix(module)}" for name in slots}
    return {name: replace(slot, alias=Alias((named[name],), slot.shape, slot.part)) for name, slot in slots.items()}


def part_slot(
    shares: Sequence[Share],
    load: Callable[[torch.Tensor], object],
    alias: Alias | None = None,
    element_bytes: float | None = None,
    load_codes: Callable[[GroupQuantized], None] | None = None,
) -> WeightSlot:
    """Returns the slot that takes `shares` of the dimensions of a tensor."""
    whole = all(share.size == share.whole for share in shares)
    part = () if whole else tuple(share.slice for share in shares)
    return WeightSlot(tuple(share.whole for share in shares), load, part, alias, element_bytes, load_codes)
