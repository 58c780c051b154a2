"""A place in a model for one tensor of a checkpoint: what the loader knows of a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Alias:
    """Where else a checkpoint may keep what belongs in a slot: at `index` of `tensor`, which is of `shape`."""

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """`load` copies a tensor of `shape` to its place, converting to the place's dtype; the tensor may be a memory map
    that is closed right after. Called once."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    alias: Alias | None = None


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


def copy_slot(target: torch.Tensor) -> Slot:
    """The slot that fills `target`."""

    def load(tensor: torch.Tensor) -> None:
        target.copy_(tensor)

    return Slot(tuple(target.shape), load)
