"""Fills a model from a checkpoint: each tensor goes from the file's memory map straight to its memory and dtype.

At most the model, one matrix that a linear method stages, and the pages of one file are in memory at once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from starling_engine.errors import WeightError
from starling_engine.weights.checkpoint import DTYPE_BYTES, TensorInfo, read_checkpoint
from starling_engine.weights.weight_slot import Loadable, WeightSlot

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) of this rank."""

NAMES_IN_ERROR = 5


def no_progress(_done: int, _total: int) -> None:
    """Does nothing, for callers that show no progress."""


def load_weights(model: Loadable, folder: Path, progress: Progress = no_progress) -> None:
    """Loads the checkpoint in `folder` into every slot of `model`.

    Raises WeightError naming tensors that are missing, unknown, misshapen or of a dtype that cannot be converted. Headers tell, so
    that is checked before the first byte is copied.
    """
    slots = model.weight_slots()
    found = read_checkpoint(folder)
    sources = _match(slots, found)
    known = slots.keys() | model.duplicates().keys() | {source.tensor for source in sources.values()}
    _refuse("is not known to this model", [n for n in found if n not in known and not model.ignores(n)])
    _copy(slots, sources, progress)
    _check_duplicates(model, found)


class Checkpoint:
    """Loads parts of the checkpoint in a folder while the model runs."""

    def __init__(self, folder: Path) -> None:
        """Raises as `read_checkpoint`."""
        self._found = read_checkpoint(folder)

    def fill(self, slots: Mapping[str, WeightSlot]) -> None:
        """Raises as `load_weights`."""
        _copy(slots, _match(slots, self._found), no_progress)


@dataclass(frozen=True, slots=True)
class _Source:
    """Source of a slot, which takes `shape`: `tensor`, which should have the shape `expected`, or `index` of it."""

    tensor: str
    info: TensorInfo
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    index: tuple[int | slice, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.info.dtype]


def _match(slots: Mapping[str, WeightSlot], found: Mapping[str, TensorInfo]) -> dict[str, _Source]:
    """Returns the source of each slot. Raises WeightError for sources that do not fit."""
    sources = {name: source for name, slot in slots.items() if (source := _source(name, slot, found))}
    _refuse("is missing", [name for name in slots if name not in sources])
    # One tensor may be the source of many slots, and is named once.
    each = {source.tensor: source for source in sources.values()}
    _refuse(
        "has the wrong shape",
        [f"{name} {list(s.info.shape)} (expected {list(s.expected)})" for name, s in each.items() if s.info.shape != s.expected],
    )
    _refuse(
        "has a dtype that cannot be loaded",
        [f"{name} ({s.info.dtype})" for name, s in each.items() if s.info.dtype not in DTYPE_BYTES],
    )
    return sources


def _source(name: str, slot: WeightSlot, found: Mapping[str, TensorInfo]) -> _Source | None:
    if name in found:
        return _Source(name, found[name], slot.local_shape, slot.shape, slot.part)
    alias = slot.alias
    if alias is None or alias.tensor not in found:
        return None
    return _Source(alias.tensor, found[alias.tensor], slot.local_shape, alias.shape, alias.index)


def _copy(slots: Mapping[str, WeightSlot], sources: Mapping[str, _Source], progress: Progress) -> None:
    total = sum(source.num_bytes for source in sources.values())
    done = 0
    for path, names in _by_file(sources).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in names:
                    slots[name].load(_read(file, sources[name]))
                    done += sources[name].num_bytes
                    progress(done, total)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path.name} cannot be read: {error}") from error


def _by_file(sources: Mapping[str, _Source]) -> dict[Path, list[str]]:
    """Returns the names to load from each file, in the model's order: a matrix made of several tensors is then done early."""
    wanted: dict[Path, list[str]] = {}
    for name, source in sources.items():
        wanted.setdefault(source.info.file, []).append(name)
    return wanted


def _read(file: Any, source: _Source) -> torch.Tensor:
    """Reads only the part that is needed: the whole tensor may hold all experts of a layer."""
    tensor: torch.Tensor = file.get_slice(source.tensor)[source.index] if source.index else file.get_tensor(source.tensor)
    return tensor


def _refuse(fault: str, names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:NAMES_IN_ERROR])
    more = f" and {len(names) - NAMES_IN_ERROR} more" if len(names) > NAMES_IN_ERROR else ""
    raise WeightError(f"checkpoint: {shown}{more} {fault}")


def _check_duplicates(model: Loadable, found: Mapping[str, TensorInfo]) -> None:
    """Raises WeightError where two copies of a tied tensor differ: the model would give wrong tokens silently."""
    slots = model.weight_slots()
    for name, original in model.duplicates().items():
        if name not in found or original not in slots:  # another stage has it
            continue
        part = slots[original].part
        if not torch.equal(_part(found, name, part), _part(found, original, part)):
            raise WeightError(f"checkpoint: {name} differs from {original}, but config.json says tie_word_embeddings: true")


def _part(found: Mapping[str, TensorInfo], name: str, part: tuple[slice, ...]) -> torch.Tensor:
    with safe_open(found[name].file, framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        return tensor
