"""The safetensors files of a model folder, read from their headers, and the tensors in them."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from starling_engine.errors import WeightError
from starling_engine.gguf.reader import pointer_of_lfs
from starling_engine.model_config.base_model import model_names
from starling_engine.weights.source import Index, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4}


class SafetensorsWeights:
    """All tensors of the checkpoint in a folder, by the names of `model_names`.

    Raises WeightError when there are no safetensors files, when one of the index is absent, or one is damaged.
    """

    def __init__(self, folder: Path) -> None:
        stored: dict[str, TensorInfo] = {}
        self.metadata: dict[str, str] = {}
        """Texts that the headers of all files have besides."""
        for path in _files(folder):
            found, metadata = _read_header(path)
            stored.update(found)
            self.metadata.update(metadata)
        self._names = model_names(stored)
        self.tensors = {name: stored[each] for name, each in self._names.items()}

    def stored_name(self, name: str) -> str:
        """Returns the name in the files of one of `tensors`."""
        return self._names[name]

    @contextmanager
    def open(self, file: Path) -> Iterator["_Reader"]:
        """See `WeightFiles`."""
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                yield _Reader(opened, self._names)
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file.name} cannot be read: {error}") from error


class _Reader:
    def __init__(self, file: Any, names: Mapping[str, str]) -> None:
        self._file = file
        self._names = names

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Reads only the part that is needed: the whole tensor may hold all experts of a layer."""
        name = self._names[name]
        tensor: torch.Tensor = self._file.get_slice(name)[index] if index else self._file.get_tensor(name)
        return tensor


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        return indexed_files(index)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise WeightError(
            f"{folder} holds weights only as PyTorch pickles (.bin, .pt); convert them to safetensors, or say --load-format pt, "
            "which reads nothing but tensors from pytorch_model.bin"
        )
    if any(folder.glob("*.tensors")):
        raise WeightError(
            f"{folder} holds weights only as files of tensorizer (.tensors), which are not read; convert them to safetensors"
        )
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        raise WeightError(
            f"{folder} holds neither {SINGLE} nor {INDEX}, and nothing says which tensors {', '.join(others[:3])} should hold; "
            "of several files the index is needed"
        )
    raise WeightError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; pickles are not downloaded: of a repository without safetensors, download "
        "pytorch_model.bin into a folder, and say --load-format pt. A GGUF file is named itself (org/name:file.gguf)"
    )


def indexed_files(index: Path) -> list[Path]:
    """Returns the files that an index names. Raises WeightError when it cannot be read, or one is absent."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise WeightError(f"{index} cannot be read: {error!r}") from error
    # Names only: an index must not lead out of its folder.
    paths = [index.parent / Path(name).name for name in names]
    absent = [path.name for path in paths if not path.exists()]
    if absent:
        raise WeightError(f"{index.name} names {', '.join(absent)}, which {index.parent} does not hold")
    return paths


def _read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    found = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                view = file.get_slice(name)
                dtype = view.get_dtype()
                found[name] = TensorInfo(path, tuple(view.get_shape()), dtype, DTYPE_BYTES.get(dtype))
    except (SafetensorError, OSError) as error:
        empty = "empty; download it again" if path.is_file() and not path.stat().st_size else ""
        fault = empty or pointer_of_lfs(path) or f"damaged or cut short: {_fault(path) or error}"
        raise WeightError(f"{path.name} is {fault}") from error
    return found, metadata


_LONGEST_HEADER = 16 << 20
"""More bytes than any checkpoint's header has. Python takes some ten times as many to read it."""
_BYTES = {
    **DTYPE_BYTES,
    "I16": 2,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
}
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")
"""Types whose elements are no whole bytes."""


def _fault(path: Path) -> str:
    """Says what is wrong with a header, which the library does not say of tensors by name. Empty where nothing is found."""
    try:
        with path.open("rb") as file:
            length, room = int.from_bytes(file.read(8), "little"), path.stat().st_size - 8
            if length > room:
                return f"the header is said to have {length} bytes, and the file has {max(0, room)} behind that number"
            header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
        tensors = {name: info for name, info in header.items() if name != "__metadata__"}
        return next((fault for each in (_faults_of_one, _faults_of_two) for fault in each(tensors, room - length)), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _faults_of_one(tensors: Mapping[str, Any], room: int) -> Iterator[str]:
    """Yields what is wrong with a tensor whatever the others are: that is its own fault, and a gap before another is not."""
    for name, info in tensors.items():
        (start, stop), dtype = info["data_offsets"], info["dtype"]
        size = _BYTES.get(dtype)
        if size is None and dtype not in _PACKED:
            yield f"{name} has the unknown dtype {dtype}"
        if size is not None and math.prod(info["shape"]) * size != stop - start:
            yield f"{name} {info['shape']} of {dtype} is not of {stop - start} bytes"
        if stop > room:
            yield f"{name} goes beyond the end of the file"


def _faults_of_two(tensors: Mapping[str, Any], _room: int) -> Iterator[str]:
    """Yields overlaps before gaps: a tensor that lies over another one leaves a gap where it should be."""
    places = sorted((*info["data_offsets"], name) for name, info in tensors.items())
    for (_, stop, before), (start, _, name) in pairwise(places):
        if start < stop:
            yield f"{before} and {name} overlap"
    for (_, stop, _), (start, _, name) in pairwise([(0, 0, ""), *places]):
        if start > stop:
            yield f"{name} lies behind bytes of no tensor"
