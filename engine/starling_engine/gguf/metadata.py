"""The metadata of a GGUF file's architecture, and what the names of its tensors tell besides."""

import math
import re
from collections.abc import Collection
from functools import cached_property
from typing import Any

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.gguf.reader import GgufFile

OF_A_LAYER = re.compile(r"blk\.([0-9]{1,9})\.(.+)")


class GgufMetadata:
    """Values by their names without the architecture's prefix, which errors name."""

    def __init__(self, file: GgufFile, by_layer: Collection[str] = ()) -> None:
        """`by_layer` are names of numbers in which layers may differ."""
        self.file = file
        self._may_differ = by_layer

    def get(self, name: str, default: Any = None) -> Any:
        value = self.file.get(self.written(name))
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> Any:
        """Returns a number above 0. One that is written for each layer is the same wherever a layer has it, or the least."""
        value = self.get(name, default)
        if isinstance(value, list):
            others = {each for each in value if each}
            if len(others) > 1 and name not in self._may_differ:
                raise UnsupportedModel(f"{self.file.path}: {self.written(name)}: layers that differ are not supported")
            value = min(others, default=0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.file.path}: {self.written(name)} must be a number above 0, got {value!r}")
        return value

    def written(self, name: str) -> str:
        return f"{self.file.architecture}.{name}"

    def refused(self, name: str, rule: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.file.path}: {self.written(name)} {rule}")

    @property
    def num_layers(self) -> int:
        """Number of layers, without those for drafts, which lie behind the others."""
        drafts = self.get("nextn_predict_layers", 0)
        return int(self.number("block_count")) - (drafts if isinstance(drafts, int) else 0)

    @property
    def layers(self) -> range:
        """Layers, of a file that lies about them no more than it has tensors."""
        return range(min(self.num_layers, len(self.file.tensors)))

    @cached_property
    def modules(self) -> frozenset[str]:
        """Names of tensors that a layer has, without its own."""
        return frozenset(module for modules in self._by_layer.values() for module in modules)

    def has(self, layer: int, tensor: str) -> bool:
        return tensor in self._by_layer.get(layer, ())

    def kinds(self, kinds: dict[str, str], other: str) -> list[str]:
        """Returns the kind of each layer by the first of these tensors that it has; `other` for one that has none."""
        return [next((kind for tensor, kind in kinds.items() if self.has(layer, tensor)), other) for layer in self.layers]

    @cached_property
    def _by_layer(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for name in self.file.tensors:
            if match := OF_A_LAYER.fullmatch(name):
                found.setdefault(int(match[1]), set()).add(match[2])
        return found
