"""The places of a model's tensors in a GGUF file: by llama.cpp's names, and in the order in which its converter wrote them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.gguf.config import family_of
from starling_engine.gguf.heads import PARTS
from starling_engine.gguf.metadata import OF_A_LAYER, GgufMetadata
from starling_engine.gguf.names import EXPERTS, KEYS, VALUES, XIELU, Change, ModuleNames, Part, Stored
from starling_engine.gguf.reader import GgufFile, GgufTensor
from starling_engine.gguf.rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.definition import TensorNames
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.model_config.registry import definition_of

_READ_WITH_THE_CONFIG = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)
_ENDING = re.compile(r"(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, eq=False)
class GgufPlace:
    """The place of a tensor in the file: all of `tensor`, or `expert` of it.

    shape    in the model
    change   what the converter did
    rows     [rows] int64, the file's rows in the model's order; None: as they lie. Elements of a vector are its rows
    columns  [columns] int64, the same of columns
    values   the tensor that holds the rest, of a matrix that was split
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    change: Change = "none"
    rows: Tensor | None = None
    columns: Tensor | None = None
    values: GgufTensor | None = None

    @property
    def is_matrix(self) -> bool:
        """Says if it may hold codes."""
        return len(self.shape) == 2 and self.change in ("none", "pairs")


def find_places(file: GgufFile, config: ModelConfig) -> dict[str, GgufPlace]:
    """Returns where each tensor is, by its name in the model. What the model has no name for keeps the file's.

    Raises WeightError for a tensor that is there twice, or whose rows do not fit the config.
    """
    places, found = _Places(file, config), dict[str, GgufPlace]()
    for tensor in file.tensors.values():
        for name, place in places.of(tensor):
            if name in found:
                raise WeightError(f"{tensor.name} is {name}, which the file has twice")
            found[name] = place
    return found | dict(places.of_activations())


class _Places:
    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._config = config
        self._file = file
        self._names: TensorNames = definition_of(config.architecture).names
        self._modules: ModuleNames = family_of(file).modules
        self._num_blocks = GgufMetadata(file).number("block_count")

    def of(self, tensor: GgufTensor) -> Iterator[tuple[str, GgufPlace]]:
        match = OF_A_LAYER.fullmatch(tensor.name)
        if match is None:
            if tensor.name not in _READ_WITH_THE_CONFIG:
                yield from self._named(tensor, "", tensor.name)
        elif not self._config.num_layers <= int(match[1]) < self._num_blocks:  # those behind are for drafts
            yield from self._named(tensor, self._names.layer.format(int(match[1])) + ".", match[2])

    def of_activations(self) -> Iterator[tuple[str, GgufPlace]]:
        """Yields the parameters of activations, which a file has in its metadata."""
        most = min(self._config.num_layers, len(self._file.tensors))
        for key, (name, shape) in XIELU.items() if self._config.hidden_act == "xielu" else ():
            for layer, number in enumerate(self._file.numbers_of(key, most)):
                yield f"{self._names.layer.format(layer)}.{self._names.activation}.{name}", GgufPlace(number, shape)

    def _named(self, tensor: GgufTensor, prefix: str, written: str) -> Iterator[tuple[str, GgufPlace]]:
        ending = _ENDING.fullmatch(written)
        # Weights of Falcon-H1's norms, decays and skips have no ending.
        module, kind = (ending[1], f".{ending[2]}") if ending else (written, ".weight")
        if module in EXPERTS and len(tensor.shape) == (3 if kind == ".weight" else 2):
            yield from self._experts(tensor, prefix, EXPERTS[module], kind)
            return
        if self._config.classifier is not None and module in PARTS:
            yield f"{getattr(self._config.classifier.head, PARTS[module])}{kind}", self._place(tensor, Stored(module))
            return
        found = self._modules.get(written, self._modules.get(module))
        if found is None:
            yield tensor.name, GgufPlace(tensor, tensor.shape)
            return
        for stored in found if isinstance(found, tuple) else (found,):
            each = Stored(stored) if isinstance(stored, str) else stored
            yield f"{prefix}{_resolved(self._names, each.name)}{'' if each.whole else kind}", self._place(tensor, each)

    def _experts(self, tensor: GgufTensor, prefix: str, parts: tuple[int, ...], kind: str) -> Iterator[tuple[str, GgufPlace]]:
        moe, count = self._config.moe, tensor.shape[0]
        if moe is None or count != moe.num_experts:
            wanted = moe.num_experts if moe else "no"
            raise WeightError(f"{tensor.name} {list(tensor.shape)} has {count} experts (expected {wanted})")
        size = -(-tensor.shape[1] // len(parts))
        rows = [None] if len(parts) == 1 else [torch.arange(at * size, (at + 1) * size) for at in range(len(parts))]
        for expert in range(count):
            for part, of_part in zip(parts, rows, strict=True):
                name = f"{prefix}{self._names.experts}.{expert}.{self._names.expert_projections[part]}{kind}"
                yield name, GgufPlace(tensor, (size, *tensor.shape[2:]), expert, rows=of_part)

    def _place(self, tensor: GgufTensor, stored: Stored) -> GgufPlace:
        shape = _shape(tensor.shape, stored.change)
        if stored.change == "pairs":
            heads = self._config.num_heads if stored.name == "q" else self._config.num_kv_heads
            if not heads or tensor.shape[0] % (2 * heads):
                raise WeightError(f"{tensor.name} {list(tensor.shape)} has rows that are no {heads} heads of pairs")
            return GgufPlace(tensor, shape, change="pairs", rows=_pairs(tensor.shape[0], heads))
        if stored.part == "heads in turn":
            heads = self._config.num_heads
            if tensor.shape[0] % (3 * heads):
                raise WeightError(f"{tensor.name} {list(tensor.shape)} has rows that are no {heads} heads")
            return GgufPlace(tensor, shape, rows=_head_by_head(tensor.shape[0], heads))
        if stored.change == "split":
            return self._split(tensor)
        delta = self._config.gated_delta
        if stored.part == "all" or delta is None:
            return GgufPlace(tensor, shape, change=stored.change)
        order = _delta_order(delta, stored.part, shape[0])
        if stored.part == "value heads as columns":
            if shape[-1] != delta.value_width:
                raise WeightError(f"{tensor.name} {list(tensor.shape)} has no {delta.value_width} columns")
            return GgufPlace(tensor, shape, change=stored.change, columns=order)
        if int(order.max()) >= shape[0]:
            raise WeightError(f"{tensor.name} {list(tensor.shape)} has fewer than {int(order.max()) + 1} rows")
        return GgufPlace(tensor, (len(order), *shape[1:]), change=stored.change, rows=order)

    def _split(self, keys: GgufTensor) -> GgufPlace:
        """Returns the place of rows of keys, [heads, columns, rows of a head] in the file, and values, [heads, rows, columns]."""
        name = keys.name.replace(KEYS, VALUES)
        values = self._file.tensors.get(name)
        if values is None:
            raise WeightError(f"{name} is missing beside {keys.name}")
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
            raise WeightError(f"{keys.name} {list(keys.shape)} and {name} {list(values.shape)} are not of the same heads")
        heads, columns, rows = keys.shape
        return GgufPlace(keys, (heads * (rows + values.shape[1]), columns), change="split", values=values)


def _resolved(names: TensorNames, path: str) -> str:
    """Returns a module's name by fields of `names`: parts between dots lead to it, parts between slashes follow one another."""
    found = []
    for part in path.split("/"):
        value: object = names
        for field in part.split("."):
            value = value[int(field)] if isinstance(value, tuple) else getattr(value, field)
        found.append(str(value))
    return ".".join(found)


def _shape(stored: tuple[int, ...], change: Change) -> tuple[int, ...]:
    """Returns the shape in the model. Dimensions of one element may be missing in a file, or be there besides."""
    match change:
        case "taps":
            return prod(stored[:-1]), 1, stored[-1]
        case "row":
            return 1, prod(stored)
        case "flat":
            return (prod(stored),)
        case "head decay":
            return 1, 1, prod(stored), 1
        case "decay" if stored[-1] == 1:
            return (prod(stored),)
    return stored


@lru_cache(maxsize=64)
def _pairs(rows: int, heads: int) -> Tensor:
    """Returns the order of rows of which those of the two halves of a head lie in turn."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


@lru_cache(maxsize=64)
def _head_by_head(rows: int, heads: int) -> Tensor:
    """Returns the order of rows of which those of queries, keys and values lie behind one another."""
    return torch.arange(rows).view(3, heads, -1).transpose(0, 1).flatten()


@lru_cache(maxsize=64)
def _delta_order(delta: GatedDeltaConfig, part: Part, rows: int) -> Tensor:
    """Returns the order of the rows of a part, of which the file has so many; of value heads as columns that of columns."""
    per_key = delta.value_heads // delta.key_heads
    if part in ("gate", "decay"):
        halves = torch.arange(2 * delta.value_heads).view(delta.key_heads, 2, per_key)
        return halves[:, int(part == "decay")].flatten()
    # The same modules have a row for each head, or one for each of its elements.
    before = 2 * delta.key_width if part == "keys and values" else 0
    width = 1 if part == "value heads" and rows == delta.value_heads else delta.value_dim
    heads = torch.arange(delta.value_heads * width).view(per_key, delta.key_heads, width)
    return torch.cat([torch.arange(before), before + heads.transpose(0, 1).flatten()])
