"""Linear methods for CPUs, of bf16 and fp32. Weights are reordered once into the layout that the kernel reads."""

import torch

from starling_engine.layers.linear import LinearPart, LinearShape
from starling_engine.layers.linear_dense import DenseLinear, StackedMethod
from starling_engine.native import ops, routing_ops
from starling_engine.native.reference import PackedWeight


class NativeLinear(StackedMethod):
    """Multiplies by our own kernel. One packed copy serves both the logits head and the embedding that is tied to it."""

    name = "native"
    _weight: PackedWeight
    _bias: torch.Tensor | None

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = ops.pack_linear(weight, gated=self._shape.gated), bias

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return ops.linear(x, self._weight, self._bias, out_dtype or torch.bfloat16)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(ids.shape[0], self._weight.k, dtype=torch.bfloat16)
        ops.embedding_packed(ids, self._weight, out)
        return out


class NativeTable(DenseLinear):
    """Keeps W as it is in the checkpoint, and copies rows of it by our own kernel: a table that nothing is multiplied by."""

    name = "native table"

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(ids, self._weight)


class NativeExactLinear(StackedMethod):
    """Multiplies a router by our own kernels, without a rounding.

    Numbers that bfloat16 has are packed as such, in half the memory: their products are exact. Others stay in fp32.
    """

    name = "native exact"
    _packed: PackedWeight | torch.Tensor
    _bias: torch.Tensor | None

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        assert dtype == torch.bfloat16 and not shape.gated
        return super().create(shape, torch.float32, device)

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if weight.shape[1] % 2 == 0 and _in_bfloat16(weight) and (bias is None or _in_bfloat16(bias)):
            self._packed = ops.pack_linear(weight.bfloat16())
            self._bias = None if bias is None else bias.bfloat16()
        else:
            self._packed, self._bias = routing_ops.pack_exact(weight), bias

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if isinstance(self._packed, PackedWeight):
            return ops.linear(x, self._packed, self._bias, out_dtype or x.dtype)
        out = routing_ops.exact_linear(x, self._packed, self._shape.out_size, self._bias)
        return out.to(out_dtype or x.dtype)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a router's rows are not looked up")


def _in_bfloat16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.bfloat16().float(), tensor)


class NativeFloatLinear(StackedMethod):
    """Multiplies fp32 of encoders by our own kernel, which with AVX2 is faster than oneDNN's."""

    name = "native fp32"
    _weight: torch.Tensor
    _bias: torch.Tensor | None

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = routing_ops.pack_exact(weight), bias

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._finished(routing_ops.exact_linear(x, self._weight, self._shape.out_size, self._bias), out_dtype)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("single rows cannot be read from the packed layout")


class MkldnnLinear(StackedMethod):
    """Multiplies by oneDNN, in its blocked layout: fp32 of encoders, and bf16 where there are no native kernels.

    In fp32 a product of 300 rows takes 0.85 of the time of `F.linear`, one of 8 rows half. (768 x 3072, EPYC 9004, one thread.)
    """

    name = "mkldnn"
    _weight: torch.Tensor
    _bias: torch.Tensor | None

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        assert not shape.lookup, "single rows cannot be read from oneDNN's layout"
        return super().create(shape, dtype, device)

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias

    def apply(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return self._finished(out, out_dtype)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("single rows cannot be read from oneDNN's layout")
