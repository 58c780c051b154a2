"""The head that turns a pooled hidden state into a number for each label. Every rank has it whole."""

import torch
from torch.nn import functional as F

from starling_engine.layers.activation import activate
from starling_engine.model_config.classifier import ClassifierConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class ClassificationHead:
    """Computes out(norm(activation(dense(x)))), where only `out` is in each model."""

    def __init__(self, build: BuildContext, config: ClassifierConfig) -> None:
        head, size = config.head, build.config.hidden_size
        self._tensors: dict[str, torch.Tensor] = {}
        self._dense = None if head.dense is None else self._matrix(build, head.dense, size, bias=head.dense_bias)
        self._activation = head.activation
        self._norm = None if head.norm is None else build.norm(head.norm)
        self._out = self._matrix(build, head.out, len(config.labels), bias=head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden_size] -> [N, labels] fp32."""
        x = x.to(self._out[0].dtype)
        if self._dense is not None:
            x = activate(self._activation, F.linear(x, *self._dense))
        if self._norm is not None:
            x = self._norm.forward(x, None)[0]
        return F.linear(x, *self._out).float()

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {name: copy_slot(tensor) for name, tensor in self._tensors.items()}
        return slots if self._norm is None else {**slots, **self._norm.weight_slots()}

    def _matrix(self, build: BuildContext, name: str, rows: int, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        size = build.config.hidden_size
        weight = self._tensors[f"{name}.weight"] = torch.empty(rows, size, dtype=build.dtype, device=build.device)
        if not bias:
            return weight, None
        vector = self._tensors[f"{name}.bias"] = torch.empty(rows, dtype=build.dtype, device=build.device)
        return weight, vector
