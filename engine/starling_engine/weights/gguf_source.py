"""The tensors of a GGUF file, under the names that a model of transformers has for them and in its order of rows."""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from starling_engine import native
from starling_engine.errors import WeightError
from starling_engine.gguf.config import ROPE_FACTORS
from starling_engine.gguf.reader import GgufFile, GgufTensor, open_gguf, stamp_of
from starling_engine.model_config.config import ModelConfig, read_gguf_config
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.registry import definition_of
from starling_engine.native import quantized_ops
from starling_engine.native.gguf_blocks import FORMATS, dequantize_blocks, read_blocks
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.weights.source import Index, TensorInfo

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OF_A_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_PAIRED = "llama"
"""The architecture whose rows of queries and keys lie as pairs that are rotated together, and not as halves of a head."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in the file: all of `tensor`, or `expert` of it; with `heads`, rows of each lie in pairs."""

    tensor: GgufTensor
    expert: int | None = None
    heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


class GgufWeights:
    """All tensors of a file. Raises as `GgufFile` and `load_model_config`."""

    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        self._path, self._stamp = path, file.stamp
        self._places = _places(file, read_gguf_config(file))
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(place) for name, place in self._places.items()}

    @contextmanager
    def open(self, file: Path) -> Iterator["_Reader"]:
        """See `WeightFiles`."""
        try:
            with file.open("rb") as opened:
                if stamp_of(os.fstat(opened.fileno())) != self._stamp:
                    raise WeightError(f"{file.name} has changed since its header was read")
                # Private, since torch wants memory that could be written.
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WeightError(f"{file.name} cannot be read: {error}") from error
        yield _Reader(data, self._places)

    def _info(self, place: _Place) -> TensorInfo:
        block, is_vector = place.tensor.type, len(place.shape) == 1
        if is_vector and block.name not in _PLAIN:
            return TensorInfo(self._path, place.shape, block.name, None)
        return TensorInfo(self._path, place.shape, block.name, block.size / block.elements, FORMATS.get(block.name))


class _Reader:
    def __init__(self, data: mmap.mmap, places: Mapping[str, _Place]) -> None:
        self._data = data
        self._places = places

    def read(self, name: str, index: Index) -> Tensor:
        place = self._places[name]
        block = place.tensor.type
        if block.name in _PLAIN:
            rows = self._rows(place).view(_PLAIN[block.name])
            return _ordered(rows, place.heads).view(place.shape)[index]
        columns = index[1:]
        rows = _ordered(self._rows(place), place.heads)[index[:1]]
        return dequantize_blocks(rows, block, torch.float32)[:, *columns]

    def read_codes(self, name: str, index: Index) -> GroupQuantized:
        place = self._places[name]
        rows = _ordered(self._rows(place), place.heads)[index[:1]]
        read = read_blocks if native.load() is None else quantized_ops.read_gguf
        found = read(rows, place.tensor.type)
        for each in (found.scales, found.minima):
            if each is not None and not each.isfinite().all():
                raise WeightError(f"{name} has scales that float16 cannot hold")
        columns = index[1] if len(index) > 1 else slice(None)
        assert isinstance(columns, slice), "a matrix of codes has no single columns"
        return found.columns(columns)

    def _rows(self, place: _Place) -> Tensor:
        """Returns the map of a matrix's rows as bytes, [rows, bytes of a row]. A vector is one row."""
        tensor = place.tensor
        row = tensor.shape[-1] // tensor.type.elements * tensor.type.size
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.start).view(-1, row)
        if place.expert is None:
            return raw
        return raw.view(tensor.shape[0], -1, row)[place.expert]


def _ordered(rows: Tensor, heads: int) -> Tensor:
    """Returns rows that lie in pairs as halves of heads."""
    if not heads:
        return rows
    if rows.shape[0] == 1:  # a bias
        return rows.view(heads, -1, 2).transpose(1, 2).reshape(1, -1)
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _places(file: GgufFile, config: ModelConfig) -> dict[str, _Place]:
    """Returns where each tensor is, by its name in the model. What the model has no name for keeps the file's."""
    names = definition_of(config.architecture).names
    found: dict[str, _Place] = {}
    for tensor in file.tensors.values():
        module = _ENDS.get(tensor.name.removesuffix(".weight"))
        if module is not None:
            named = {f"{getattr(names, module)}.weight": _Place(tensor)}
        elif tensor.name != ROPE_FACTORS:
            named = _of_a_layer(tensor, names, config, paired=file.architecture == _PAIRED)
        else:
            continue
        if twice := found.keys() & named.keys():
            raise WeightError(f"{tensor.name} is {min(twice)}, which the file has twice")
        found.update(named)
    return found


def _of_a_layer(tensor: GgufTensor, names: TensorNames, config: ModelConfig, *, paired: bool) -> dict[str, _Place]:
    match = _OF_A_LAYER.fullmatch(tensor.name)
    if match is None:
        return {tensor.name: _Place(tensor)}
    layer, module, kind = names.layer.format(match[1]), match[2], match[3]
    if module in _EXPERTS and len(tensor.shape) == 3:
        if config.moe is None or tensor.shape[0] != config.moe.num_experts:
            wanted = config.moe.num_experts if config.moe else "no"
            raise WeightError(f"{tensor.name} {list(tensor.shape)} has {tensor.shape[0]} experts (expected {wanted})")
        projection = names.expert_projections[_EXPERTS.index(module)]
        return {
            f"{layer}.{names.experts}.{expert}.{projection}.{kind}": _Place(tensor, expert) for expert in range(tensor.shape[0])
        }
    if module not in _MODULES:
        return {tensor.name: _Place(tensor)}
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(module, 0) if paired else 0
    if heads and tensor.shape[0] % (2 * heads):
        raise WeightError(f"{tensor.name} {list(tensor.shape)} has rows that are no {heads} heads of pairs")
    return {f"{layer}.{getattr(names, _MODULES[module])}.{kind}": _Place(tensor, heads=heads)}


_ENDS = {"token_embd": "embedding", "output_norm": "norm", "output": "lm_head"}
_MODULES = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "ffn_gate_inp": "router",
}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Fields of `TensorNames` by the names of llama.cpp's modules; experts in the order of `expert_projections`."""
