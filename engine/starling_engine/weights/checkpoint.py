"""The safetensors files of a model folder and the tensors in them, read from their headers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from starling_engine.errors import WeightError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint; `dtype` as safetensors names it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def read_checkpoint(folder: Path) -> dict[str, TensorInfo]:
    """Returns all tensors of the checkpoint in `folder`, by name. Reads headers only.

    Raises WeightError when there are no safetensors files, when one of the index is absent, or one is damaged.
    """
    found: dict[str, TensorInfo] = {}
    for path in _files(folder):
        found.update(_read_header(path))
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        return _indexed_files(index)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise WeightError(
            f"{folder} holds weights only as PyTorch pickles (.bin, .pt), which can run code when opened; "
            "convert them to safetensors"
        )
    raise WeightError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightError(f"{index} cannot be read: {error!r}") from error
    # Names only: an index must not lead out of its folder.
    paths = [index.parent / Path(name).name for name in names]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise WeightError(f"{index.name} names {', '.join(absent)}, which {index.parent} does not hold")
    return paths


def _read_header(path: Path) -> dict[str, TensorInfo]:
    found = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                view = file.get_slice(name)
                found[name] = TensorInfo(path, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{path.name} is damaged or cut short: {error}") from error
    return found
