"""Linear methods that quantize weights while they are loaded: in 8 or 4 bits, on CPUs."""

from dataclasses import replace

import torch

from starling_engine.layers.linear import LinearPart, LinearShape
from starling_engine.layers.linear_dense import StackedMethod
from starling_engine.native import quantized_ops as ops
from starling_engine.native.group_quantized import INT4, INT8, Format, quantize
from starling_engine.native.quantized_ops import PackedQuantized

ONLINE: dict[str, Format] = {"int8": INT8, "int4": INT4}
"""What weights become, by `EngineArgs.quantization`."""


class QuantizedLinear(StackedMethod):
    """Keeps W in groups of 32 columns with a scale each. Rows of x are rounded to 8 bits on the way."""

    _weight: PackedQuantized
    _bias: torch.Tensor | None

    def __init__(self, name: str) -> None:
        self.name = name
        self._format = ONLINE[name]

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        size = self._format.element_bytes
        return [
            replace(part, element_bytes=size) if part.name == "weight" else part for part in super().create(shape, dtype, device)
        ]

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = ops.pack_quantized(quantize(weight, self._format), gated=self._shape.gated), bias

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return ops.quantized_linear(x, self._weight, self._bias, out_dtype or torch.bfloat16)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(ids.shape[0], self._weight.k, dtype=torch.bfloat16)
        ops.embedding_quantized(ids, self._weight, out)
        return out
