"""The plain linear methods: one tensor and torch's own matrix product. They work for every dtype on every device."""

from abc import ABC, abstractmethod

import torch
from torch.nn import functional as F

from starling_engine.kernels.matmul import linear
from starling_engine.layers.activation import silu_and_mul
from starling_engine.layers.linear import LinearPart, LinearShape
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.topology.shard import Share


class StackedWeights:
    """The stacked matrix and bias of a linear layer while they are being loaded; allocated at the first part."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def parts(self) -> list[LinearPart]:
        shape = self.shape
        found = [LinearPart(module, "weight", (rows, shape.ins)) for module, rows in enumerate(shape.outs)]
        if shape.bias:
            found += [LinearPart(module, "bias", (self._added_here(rows),)) for module, rows in enumerate(shape.outs)]
        return found

    def _added_here(self, rows: Share) -> Share:
        """Returns the rows of the bias that this rank adds. Where ranks hold some columns each, the first one adds it."""
        return rows if self.shape.ins.start == 0 else Share(0, 0, rows.whole)

    def load(self, part: LinearPart, tensor: torch.Tensor) -> None:
        rows = self.shape.rows(part.module)
        if part.name == "weight":
            if self.weight is None:
                self.weight = self._empty(self.shape.out_size, self.shape.in_size)
            self.weight[rows].copy_(tensor)
        elif self.shape.ins.start == 0:
            if self.bias is None:
                self.bias = self._empty(self.shape.out_size)
            self.bias[rows].copy_(tensor)

    def release(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the finished (weight, bias) and keeps neither."""
        weight, bias = self.weight, self.bias
        assert weight is not None, "released before any part was loaded"
        self.weight = self.bias = None
        return weight, bias

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)


class StackedMethod(ABC):
    """Base of methods for plain weights: stacks the parts as they come, then brings them to the method's own form."""

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        self._shape = shape
        self._staged = StackedWeights(shape, dtype, device)
        self._activation = silu_and_mul(dtype, device) if shape.gated else None
        return self._staged.parts()

    def load_part(self, part: LinearPart, tensor: torch.Tensor) -> None:
        self._staged.load(part, tensor)

    def load_codes(self, part: LinearPart, matrix: GroupQuantized) -> None:
        raise NotImplementedError(f"{part} has no codes: this method takes numbers")

    def finish(self) -> None:
        weight, bias = self._staged.release()
        self.store(weight, bias)

    def _finished(self, product: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        out = product if self._activation is None else self._activation(product)
        return out if out_dtype is None else out.to(out_dtype)

    @abstractmethod
    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keeps weight [out_size, in_size] and bias [out_size] in the form that `apply` reads."""


class DenseLinear(StackedMethod):
    """Keeps W as it is in the checkpoint, [out_size, in_size]."""

    name = "dense"
    _weight: torch.Tensor
    _bias: torch.Tensor | None

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._finished(linear(x, self._weight, self._bias), out_dtype)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight)


class ExactLinear(DenseLinear):
    """Keeps W, and multiplies, in fp32 whatever the model's dtype: for a small matrix whose product must not be rounded."""

    name = "exact"

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:  # noqa: ARG002
        return super().create(shape, torch.float32, device)

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().apply(x.float(), out_dtype or x.dtype)
