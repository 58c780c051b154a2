"""A place in a model for one tensor of a checkpoint: what the loader knows of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from starling_engine.topology.shard import Share


@dataclass(frozen=True, slots=True)
class Alias:
    """Where else a checkpoint may keep what a slot takes: at `index` of `tensor`, which is of `shape`."""

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """`load` copies what this rank takes of a tensor of `shape` to its place, converting to the place's dtype; what it is given may
    be a memory map that is closed right after. Called once.

    `take` is the part in each dimension, from the first on; dimensions that it does not name are taken whole.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    take: tuple[slice, ...] = ()
    alias: Alias | None = None

    @property
    def taken(self) -> tuple[int, ...]:
        """The shape of that part."""
        ends = [part.indices(size) for part, size in zip(self.take, self.shape, strict=False)]
        return (*(stop - start for start, stop, _ in ends), *self.shape[len(ends) :])


class Loadable(Protocol):
    """A model that can be filled from a checkpoint."""

    def slots(self) -> Mapping[str, Slot]:
        """By the checkpoint's tensor names, in the order in which the model uses them; every one must be loaded."""
        ...

    def duplicates(self) -> Mapping[str, str]:
        """Tensors that a checkpoint may hold besides (tied weights saved twice), and the slot whose values they must equal."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor that has no slot is harmless."""
        ...


class WeightSource(Protocol):
    """Where weights come from also after the start."""

    def fill(self, slots: Mapping[str, Slot]) -> None:
        """Loads every slot."""
        ...


def copy_slot(target: torch.Tensor) -> Slot:
    """The slot that fills `target`."""

    def load(tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    return Slot(tuple(target.shape), load)


def part_slot(shares: Sequence[Share], load: Callable[[torch.Tensor], None], alias: Alias | None = None) -> Slot:
    """The slot that takes `shares` of the dimensions of a tensor."""
    whole = all(share.size == share.whole for share in shares)
    return Slot(tuple(share.whole for share in shares), load, () if whole else tuple(share.slice for share in shares), alias)
