"""The dense modules that vectors pass behind their pooling, in fp32. Every rank of the last stage has them whole."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from starling_engine.errors import WeightError
from starling_engine.layers.activation import activate
from starling_engine.model_config.projection import ProjectionConfig
from starling_engine.weights.projection_files import read_projection_tensors


class Projections:
    """Dense modules, one behind the other; without any a vector stays as it is."""

    def __init__(self, configs: Sequence[ProjectionConfig], device: torch.device) -> None:
        self._configs = configs
        self._matrices = [torch.empty(one.out_features, one.in_features, device=device) for one in configs]
        self._biases = [torch.zeros(one.out_features, device=device) for one in configs]

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in (*self._matrices, *self._biases))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """vectors [..., hidden_size] fp32 -> [..., out_features] of the last module."""
        for config, matrix, bias in zip(self._configs, self._matrices, self._biases, strict=True):
            vectors = activate(config.activation, F.linear(vectors, matrix, bias))
        return vectors

    def load(self, folder: Path, *, pickles: bool) -> None:
        """Reads the files below the model's folder. Raises WeightError naming what is missing, or has another shape."""
        for config, matrix, bias in zip(self._configs, self._matrices, self._biases, strict=True):
            tensors = read_projection_tensors(folder / config.folder, pickles=pickles)
            wanted = {"linear.weight": matrix, **({"linear.bias": bias} if config.bias else {})}
            for name, target in wanted.items():
                found = tensors.get(name)
                if found is None or found.shape != target.shape:
                    has = "nothing" if found is None else list(found.shape)
                    raise WeightError(f"{config.folder}: {name} must be {list(target.shape)}, got {has}")
                target.copy_(found)

    def fill(self) -> None:
        """Makes weights where there are no files."""
        for matrix in self._matrices:
            torch.nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
