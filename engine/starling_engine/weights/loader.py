"""Fills a model from a checkpoint: each tensor goes from the file's memory map straight to its place and dtype.

The most that is held at once is the model, what a linear method stages for one matrix, and the pages of one file.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from starling_engine.errors import WeightError
from starling_engine.weights.checkpoint import DTYPE_BYTES, TensorInfo, read_checkpoint
from starling_engine.weights.slot import Loadable, Slot

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all), of what this rank takes."""

NAMES_IN_ERROR = 5


def no_progress(_done: int, _total: int) -> None:
    """For callers that show none."""


def load_weights(model: Loadable, folder: Path, progress: Progress = no_progress) -> None:
    """Loads the checkpoint in `folder` into every slot of `model`.

    Raises WeightError naming the tensors when one is missing, unknown, misshapen or of a dtype that cannot be converted; all
    of that is checked on the headers, before the first byte is copied.
    """
    slots = model.slots()
    found = read_checkpoint(folder)
    wanted = _match(model, slots, found)
    sizes = {name: math.prod(slot.taken) * DTYPE_BYTES[found[name].dtype] for name, slot in slots.items()}
    total = sum(sizes.values())
    done = 0
    for path, names in wanted.items():
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in names:
                slot = slots[name]
                slot.load(file.get_slice(name)[slot.take] if slot.take else file.get_tensor(name))
                done += sizes[name]
                progress(done, total)
    _check_duplicates(model, found)


def _match(model: Loadable, slots: Mapping[str, Slot], found: Mapping[str, TensorInfo]) -> dict[Path, list[str]]:
    """The names to load from each file, in the model's order: a matrix made of several tensors is then done early."""
    known = slots.keys() | model.duplicates().keys()
    _refuse("is missing", [name for name in slots if name not in found])
    _refuse("is not known to this model", [n for n in found if n not in known and not model.ignores(n)])
    _refuse(
        "has the wrong shape",
        [
            f"{name} {list(found[name].shape)} (expected {list(slot.shape)})"
            for name, slot in slots.items()
            if found[name].shape != slot.shape
        ],
    )
    _refuse(
        "has a dtype that cannot be loaded",
        [f"{name} ({found[name].dtype})" for name in slots if found[name].dtype not in DTYPE_BYTES],
    )
    wanted: dict[Path, list[str]] = {}
    for name in slots:
        wanted.setdefault(found[name].file, []).append(name)
    return wanted


def _refuse(fault: str, names: list[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:NAMES_IN_ERROR])
    more = f" and {len(names) - NAMES_IN_ERROR} more" if len(names) > NAMES_IN_ERROR else ""
    raise WeightError(f"checkpoint: {shown}{more} {fault}")


def _check_duplicates(model: Loadable, found: Mapping[str, TensorInfo]) -> None:
    """A tied tensor that was saved twice must hold the same twice, or the model would answer wrongly without a word."""
    slots = model.slots()
    for name, original in model.duplicates().items():
        take = slots[original].take
        if name in found and not torch.equal(_read(found, name, take), _read(found, original, take)):
            raise WeightError(f"checkpoint: {name} differs from {original}, but config.json says tie_word_embeddings: true")


def _read(found: Mapping[str, TensorInfo], name: str, take: tuple[slice, ...]) -> torch.Tensor:
    with safe_open(found[name].file, framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_slice(name)[take] if take else file.get_tensor(name)
        return tensor
