"""The plain linear methods: one tensor and torch's own matrix product. They work for every dtype on every device."""

from abc import ABC, abstractmethod

import torch
from torch.nn import functional as F

from starling_engine.kernels.fused_rows import RowNorm, alone_rows, fused_rows
from starling_engine.kernels.matmul import linear, linear_fp32, sums_in_fp32
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
        self._sums_in_fp32 = bias is None and self._activation is None and sums_in_fp32(weight.dtype, weight.device)
        self._alone_rows = alone_rows(weight.dtype, weight.device)

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if out_dtype == torch.float32 and self._sums_in_fp32:
            out = x.new_empty(len(x), len(self._weight), dtype=torch.float32)
            linear_fp32(x, self._weight, out)
            return out
        return self._finished(linear(x, self._weight, self._bias), out_dtype)

    def apply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `WritesInto`."""
        if len(x) <= self._alone_rows and x.dtype == self._weight.dtype:
            from starling_engine.kernels.few_rows import few_rows_linear

            few_rows_linear(x, self._weight, self._bias, gated=self._activation is not None, out=out)
        elif self._sums_in_fp32:
            linear_fp32(x, self._weight, out)
        else:
            out.copy_(self.apply(x))

    def fused_rows(self) -> int:
        """See `FusesRows`."""
        return fused_rows(self._staged.dtype, self._staged.device)

    def apply_fused(self, x: torch.Tensor, norm: RowNorm | None, add_to: torch.Tensor | None) -> torch.Tensor:
        """See `FusesRows`."""
        from starling_engine.kernels.few_rows import few_rows_linear

        return few_rows_linear(x, self._weight, self._bias, norm, gated=self._activation is not None, add_to=add_to)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight)


class ExactLinear(DenseLinear):
    """Multiplies without rounding, whatever the model's dtype: for a small matrix whose product must not be rounded.

    It keeps W in fp32. Where sums of products in the model's dtype are fp32, and W loses nothing in it, W is kept in that.
    """

    name = "exact"

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        self._dtype = dtype
        return super().create(shape, torch.float32, device)

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if bias is None and sums_in_fp32(self._dtype, weight.device):
            rounded = weight.to(self._dtype)
            if weight.is_meta or torch.equal(rounded.float(), weight):
                weight = rounded
        super().store(weight, bias)

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._sums_in_fp32:
            return self._finished(super().apply(x, torch.float32), out_dtype or x.dtype)
        return super().apply(x.float(), out_dtype or x.dtype)
