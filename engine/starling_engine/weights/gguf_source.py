"""The tensors of a model's GGUF files, under the names that transformers has for them, in its order of rows and its numbers."""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from starling_engine import native
from starling_engine.errors import WeightError
from starling_engine.gguf.names import Change
from starling_engine.gguf.reader import GgufTensor, open_gguf, stamp_of
from starling_engine.model_config.config import read_gguf_config
from starling_engine.native import quantized_ops
from starling_engine.native.gguf_blocks import FORMATS, dequantize_blocks, read_blocks
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.weights.gguf_places import GgufPlace, find_places
from starling_engine.weights.source import Index, TensorInfo

LEAST_ALIGNMENT = 8
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufWeights:
    """All tensors of a file and of those that go on behind it. Raises as `open_gguf` and `load_model_config`."""

    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        self._stamps = {each: part.stamp for each, part in file.parts.items()}
        self._places = find_places(file, read_gguf_config(file))
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(place) for name, place in self._places.items()}

    @contextmanager
    def open(self, file: Path) -> Iterator["_Reader"]:
        """See `WeightFiles`."""
        yield _Reader(file, self._map, self._places)

    def _map(self, file: Path) -> mmap.mmap:
        try:
            with file.open("rb") as opened:
                if stamp_of(os.fstat(opened.fileno())) != self._stamps[file]:
                    raise WeightError(f"{file.name} has changed since its header was read")
                # Private, since torch wants memory that could be written.
                return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WeightError(f"{file.name} cannot be read: {error}") from error

    def _info(self, place: GgufPlace) -> TensorInfo:
        block = place.tensor.type
        if place.values is not None:
            stored = place.tensor.num_bytes + place.values.num_bytes
            return TensorInfo(place.tensor.file, place.shape, block.name, stored / prod(place.shape), None)
        if block.name not in _PLAIN and not place.is_matrix:
            return TensorInfo(place.tensor.file, place.shape, block.name, None)
        form = FORMATS.get(block.name)
        if form is not None and place.columns is not None and not _in_groups(place.columns, form.group):
            form = None
        return TensorInfo(place.tensor.file, place.shape, block.name, block.size / block.elements, form)


class _Reader:
    def __init__(self, file: Path, map_file: Callable[[Path], mmap.mmap], places: Mapping[str, GgufPlace]) -> None:
        """Maps `file`, and another one where half of a matrix is in that."""
        self._map_file = map_file
        self._maps = {file: map_file(file)}
        self._places = places

    def read(self, name: str, index: Index) -> Tensor:
        place = self._places[name]
        block = place.tensor.type
        if place.values is not None:
            keys, values = self._numbers(place.tensor).transpose(1, 2), self._numbers(place.values)
            return torch.cat([keys, values], dim=1).view(place.shape)[index]
        if block.name in _PLAIN:
            rows = self._rows(place).view(_PLAIN[block.name])
            if place.rows is not None:
                rows = rows.view(1, -1)[:, place.rows] if len(place.shape) == 1 else rows[place.rows]
            rows = rows if place.columns is None else rows[:, place.columns]
            return _undone(rows.view(place.shape), place.change, name)[index]
        numbers = dequantize_blocks(self._some_rows(place, index), block, torch.float32)
        return (numbers if place.columns is None else numbers[:, place.columns])[:, *index[1:]]

    def read_codes(self, name: str, index: Index) -> GroupQuantized:
        place = self._places[name]
        read = read_blocks if native.load() is None else quantized_ops.read_gguf
        found = read(self._some_rows(place, index), place.tensor.type)
        for each in (found.scales, found.minima):
            if each is not None and not each.isfinite().all():
                raise WeightError(f"{name} has scales that float16 cannot hold")
        columns = index[1] if len(index) > 1 else slice(None)
        assert isinstance(columns, slice), "a matrix of codes has no single columns"
        return (found if place.columns is None else _with_columns(found, place.columns)).columns(columns)

    def _some_rows(self, place: GgufPlace, index: Index) -> Tensor:
        """Returns the bytes of rows of a matrix, in the model's order."""
        rows = self._rows(place)
        return rows[index[:1]] if place.rows is None else rows[place.rows[index[:1]]]

    def _rows(self, place: GgufPlace) -> Tensor:
        """Returns the map of a matrix's rows as bytes, [rows, bytes of a row]. A vector is one row."""
        raw = self._bytes(place.tensor)
        if place.expert is None:
            return raw
        return raw.view(place.tensor.shape[0], -1, raw.shape[1])[place.expert]

    def _numbers(self, tensor: GgufTensor) -> Tensor:
        """Returns all of a tensor, dequantized."""
        rows, block = self._bytes(tensor), tensor.type
        plain = _PLAIN.get(block.name)
        numbers = dequantize_blocks(rows, block, torch.float32) if plain is None else rows.view(plain)
        return numbers.view(tensor.shape)

    def _bytes(self, tensor: GgufTensor) -> Tensor:
        """Returns a map of a tensor's rows, [rows, bytes of a row]; a copy of a number of the metadata, which is not aligned."""
        row = tensor.shape[-1] // tensor.type.elements * tensor.type.size
        if tensor.file not in self._maps:
            self._maps[tensor.file] = self._map_file(tensor.file)
        data = self._maps[tensor.file]
        found = torch.frombuffer(data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.start).view(-1, row)
        return found.clone() if tensor.start % LEAST_ALIGNMENT else found


def _undone(numbers: Tensor, change: Change, name: str) -> Tensor:
    """Returns what the checkpoint had. Raises WeightError for decays that no logarithm can have made."""
    if change == "one added":
        return numbers.float() - 1
    if change in ("decay", "head decay"):
        rates = -numbers.float()
        if not (rates > 0).all():
            raise WeightError(f"{name} has decays that are not below 0")
        return rates.log()
    return numbers


def _in_groups(order: Tensor, group: int) -> bool:
    """Says if columns that share a scale stay together, in their order."""
    if len(order) % group:
        return False
    groups = order.view(-1, group)
    return bool((groups == groups[:, :1] // group * group + torch.arange(group)).all())


def _with_columns(matrix: GroupQuantized, order: Tensor) -> GroupQuantized:
    """Returns columns in the order [columns] int64, in which groups stay what they are."""
    groups = order[:: matrix.format.group] // matrix.format.group
    minima = None if matrix.minima is None else matrix.minima[:, groups]
    return replace(matrix, codes=matrix.codes[:, order], scales=matrix.scales[:, groups], minima=minima)
