"""The tensors in pytorch_model.bin files: pickles, of which torch reads nothing but tensors (`weights_only`), so no code runs."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from starling_engine.errors import WeightError
from starling_engine.model_config.base_model import PREFIX, has_base_names
from starling_engine.weights.safetensors_source import DTYPE_BYTES, indexed_files
from starling_engine.weights.source import Index, TensorInfo, TensorReader

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""Dtypes as safetensors names them."""


class PickledWeights:
    """All tensors of the checkpoint in a folder, which are maps of the files. Names are as in `SafetensorsWeights`.

    Raises WeightError when there are none, when one of the index is absent, or one holds other things than tensors.
    """

    def __init__(self, folder: Path) -> None:
        paths = indexed_files(folder / INDEX) if (folder / INDEX).exists() else [folder / SINGLE]
        if not paths[0].exists():
            raise WeightError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        self._files = {path: _load(path) for path in paths}
        found = {name: _info(path, tensor) for path, tensors in self._files.items() for name, tensor in tensors.items()}
        self._prefix = PREFIX if has_base_names(found) else ""
        self.tensors = {f"{self._prefix}{name}": info for name, info in found.items()}

    @contextmanager
    def open(self, file: Path) -> Iterator[TensorReader]:
        """See `WeightFiles`."""
        yield _Reader(self._files[file], self._prefix)


class _Reader:
    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._tensors = tensors
        self._prefix = prefix

    def read(self, name: str, index: Index) -> torch.Tensor:
        tensor = self._tensors[name.removeprefix(self._prefix)]
        return tensor[index] if index else tensor


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise WeightError(f"{path.name} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise WeightError(f"{path.name} holds other things than tensors by their names")
    return dict(found)


def _info(path: Path, tensor: torch.Tensor) -> TensorInfo:
    dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
    return TensorInfo(path, tuple(tensor.shape), dtype, DTYPE_BYTES.get(dtype))
