"""Heads on top of hidden states: of labels, and of masked tokens. Every rank has them whole, but for a tied embedding."""

import torch
from torch.nn import functional as F

from starling_engine.layers.activation import activate
from starling_engine.model_config.classifier import ClassifierConfig, HeadShape
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class ClassificationHead:
    """Computes out(norm(activation(dense(x)))), where only `out` is in each model."""

    def __init__(self, build: BuildContext, config: ClassifierConfig) -> None:
        self._states = _HeadStates(build, config.head)
        self._out = _Matrix(build, config.head.out, len(config.labels), bias=config.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden_size] -> [N, labels] fp32."""
        return self._out.forward(self._states.forward(x)).float()

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {**self._states.weight_slots(), **self._out.weight_slots()}


class MaskedHead:
    """Computes norm(activation(dense(x))), of which the embedding makes logits, and the bias that is added to these."""

    def __init__(self, build: BuildContext, head: HeadShape) -> None:
        self._states = _HeadStates(build, head)
        self._bias_name = f"{head.out}.bias"
        self._bias: torch.Tensor | None = None
        if head.bias:
            self._bias = torch.empty(build.config.vocab_size, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, hidden_size] -> [N, hidden_size]."""
        return self._states.forward(x)

    def add_bias(self, logits: torch.Tensor) -> torch.Tensor:
        """Adds to logits [N, vocab_size] in place."""
        return logits if self._bias is None else logits.add_(self._bias)

    def weight_slots(self) -> dict[str, WeightSlot]:
        bias = {} if self._bias is None else {self._bias_name: copy_slot(self._bias)}
        return {**self._states.weight_slots(), **bias}


class _HeadStates:
    """Computes norm(activation(dense(x))), each where the head has it."""

    def __init__(self, build: BuildContext, head: HeadShape) -> None:
        self._dtype = build.dtype
        size = build.config.hidden_size
        self._dense = None if head.dense is None else _Matrix(build, head.dense, size, bias=head.dense_bias)
        self._activation = head.activation
        self._norm = None if head.norm is None else build.norm(head.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._dtype)
        if self._dense is not None:
            x = activate(self._activation, self._dense.forward(x))
        return x if self._norm is None else self._norm.forward(x, None)[0]

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = [part.weight_slots() for part in (self._dense, self._norm) if part is not None]
        return {name: slot for part in parts for name, slot in part.items()}


class _Matrix:
    def __init__(self, build: BuildContext, name: str, rows: int, *, bias: bool) -> None:
        self._name = name
        self._weight = torch.empty(rows, build.config.hidden_size, dtype=build.dtype, device=build.device)
        self._bias = torch.empty(rows, dtype=build.dtype, device=build.device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def weight_slots(self) -> dict[str, WeightSlot]:
        bias = {} if self._bias is None else {f"{self._name}.bias": copy_slot(self._bias)}
        return {f"{self._name}.weight": copy_slot(self._weight), **bias}
