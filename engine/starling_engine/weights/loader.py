"""Fills a model from a checkpoint: each tensor goes from the file's memory map straight to its memory and dtype.

At most the model, one matrix that a linear method stages, and the pages of one file are in memory at once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from starling_engine.errors import WeightError
from starling_engine.weights.checkpoint import open_checkpoint
from starling_engine.weights.source import CodeReader, TensorInfo, TensorReader, WeightFiles
from starling_engine.weights.weight_slot import Loadable, WeightSlot

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) of this rank."""

NAMES_IN_ERROR = 5


def no_progress(_done: int, _total: int) -> None:
    """Does nothing, for callers that show no progress."""


def load_weights(model: Loadable, path: Path, progress: Progress = no_progress, *, pickles: bool = False) -> None:
    """Loads the checkpoint at `path` into every slot of `model`; see `open_checkpoint`.

    Raises WeightError naming tensors that are missing, unknown, misshapen or of a dtype that cannot be converted. Headers tell, so
    that is checked before the first byte is copied.
    """
    slots = model.weight_slots()
    files = open_checkpoint(path, pickles=pickles)
    found = files.tensors
    sources = _match(slots, found)
    known = slots.keys() | model.duplicates().keys() | {source.tensor for source in sources.values()}
    unknown = [name for name in found if name not in known and not model.ignores(name)]
    _refuse("is not known to this model", [name for name in unknown if not _is_zero_bias(files, name)])
    _copy(slots, files, sources, progress)
    _check_duplicates(model, files)


class Checkpoint:
    """Loads parts of the checkpoint at a path while the model runs."""

    def __init__(self, path: Path, *, pickles: bool = False) -> None:
        """Raises as `open_checkpoint`."""
        self._files = open_checkpoint(path, pickles=pickles)

    def fill(self, slots: Mapping[str, WeightSlot]) -> None:
        """Raises as `load_weights`."""
        _copy(slots, self._files, _match(slots, self._files.tensors), no_progress)


@dataclass(frozen=True, slots=True)
class _Source:
    """Source of a slot, which takes `shape`: `tensor`, which should have the shape `expected`, or `index` of it.

    Its rows are the slot's columns if it is `transposed`.
    """

    tensor: str
    info: TensorInfo
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape) * (self.info.element_bytes or 0))


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
        [f"{name} ({s.info.dtype})" for name, s in each.items() if s.info.element_bytes is None],
    )
    return sources


def _source(name: str, slot: WeightSlot, found: Mapping[str, TensorInfo]) -> _Source | None:
    if name in found:
        if slot.transposed:
            rows, columns = (*slot.part, slice(None), slice(None))[:2]
            return _Source(name, found[name], slot.local_shape, slot.shape[::-1], (columns, rows), transposed=True)
        return _Source(name, found[name], slot.local_shape, slot.shape, slot.part)
    alias = slot.alias
    tensor = next((each for each in alias.tensors if each in found), None) if alias else None
    if alias is None or tensor is None:
        return None
    if alias.other is not None and found[tensor].shape == alias.other.shape != alias.shape:
        alias = alias.other
    return _Source(tensor, found[tensor], slot.local_shape, alias.shape, alias.index, alias.transposed)


def _copy(slots: Mapping[str, WeightSlot], files: WeightFiles, sources: Mapping[str, _Source], progress: Progress) -> None:
    total = sum(source.num_bytes for source in sources.values())
    done = 0
    for path, names in _by_file(sources).items():
        with files.open(path) as file:
            for name in names:
                _load(slots[name], file, sources[name])
                done += sources[name].num_bytes
                progress(done, total)


def _load(slot: WeightSlot, file: TensorReader, source: _Source) -> None:
    if slot.load_codes is not None and source.info.form is not None:
        assert isinstance(file, CodeReader), "its tensors have forms"
        slot.load_codes(file.read_codes(source.tensor, source.index))
    else:
        found = file.read(source.tensor, source.index)
        slot.load(found.T if source.transposed else found)


def _by_file(sources: Mapping[str, _Source]) -> dict[Path, list[str]]:
    """Returns the names to load from each file, in the model's order: a matrix made of several tensors is then done early."""
    wanted: dict[Path, list[str]] = {}
    for name, source in sources.items():
        wanted.setdefault(source.info.file, []).append(name)
    return wanted


def _refuse(fault: str, names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:NAMES_IN_ERROR])
    more = f" and {len(names) - NAMES_IN_ERROR} more" if len(names) > NAMES_IN_ERROR else ""
    raise WeightError(f"checkpoint: {shown}{more} {fault}")


def _check_duplicates(model: Loadable, files: WeightFiles) -> None:
    """Raises WeightError where two copies of a tied tensor differ: the model would give wrong tokens silently."""
    slots = model.weight_slots()
    for name, original in model.duplicates().items():
        if name not in files.tensors or original not in files.tensors or original not in slots:  # another stage has it
            continue
        part = slots[original].part
        if not torch.equal(_read(files, name, part), _read(files, original, part)):
            raise WeightError(f"checkpoint: {name} differs from {original}, but config.json says tie_word_embeddings: true")


def _is_zero_bias(files: WeightFiles, name: str) -> bool:
    """Returns whether it adds nothing: older quantizers write a bias of zeros for every matrix."""
    return name.endswith(".bias") and len(files.tensors[name].shape) == 1 and not bool(_read(files, name, ()).any())


def _read(files: WeightFiles, name: str, part: tuple[slice, ...]) -> torch.Tensor:
    with files.open(files.tensors[name].file) as file:
        return file.read(name, part).clone()
