"""The tensors in pytorch_model.bin files: pickles, of which torch reads nothing but tensors (`weights_only`), so no code runs."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from starling_engine.errors import WeightError
from starling_engine.model_config.base_model import model_names
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
        self._files = {path: load_pickle(path, path.name, mmap=True) for path in paths}
        found = {name: _info(path, tensor) for path, tensors in self._files.items() for name, tensor in tensors.items()}
        self._names = model_names(found)
        self.tensors = {name: found[each] for name, each in self._names.items()}

    @contextmanager
    def open(self, file: Path) -> Iterator[TensorReader]:
        """See `WeightFiles`."""
        yield _Reader(self._files[file], self._names)


class _Reader:
    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = names

    def read(self, name: str, index: Index) -> torch.Tensor:
        tensor = self._tensors[self._names[name]]
        return tensor[index] if index else tensor


def load_pickle(path: Path, name: str, *, mmap: bool) -> dict[str, torch.Tensor]:
    """Reads nothing but tensors from a pickle, which errors call `name`. Raises WeightError. `mmap` cannot read old files."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise WeightError(f"{name} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise WeightError(f"{name} holds other things than tensors by their names")
    return dict(found)


def _info(path: Path, tensor: torch.Tensor) -> TensorInfo:
    dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
    return TensorInfo(path, tuple(tensor.shape), dtype, DTYPE_BYTES.get(dtype))
