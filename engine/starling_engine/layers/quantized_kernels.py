"""Kernels for matrices in 2 to 8 bits: native ones for bfloat16 on a CPU, Triton's on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from starling_engine import native
from starling_engine.kernels.fp8 import rounds, scaled_bytes
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.native import quantized_ops as ops
from starling_engine.native.group_quantized import Format, GroupQuantized
from starling_engine.platforms.triton_support import capability, triton_runs


@dataclass(frozen=True, slots=True)
class QuantizedKernels:
    """Functions of one kind of kernels. Each has a packed form of its own, which its functions alone know.

    pack    makes it of a matrix [N, K]; with `gates`, one of gates above as many ups
    linear  x [M, K], packed, bias [N] or None, dtype of the result, out [M, width] or None -> [M, width]
    gather  x [M, K], order [K'] int32 on the device -> [M, K']; see `group_quantized.gather_columns`
    lookup  ids [T] int64, packed -> rows [T, K]
    width   columns of the product
    rounding  how `linear` rounds rows to FP8, and takes such as have been rounded so; None: it does not
    gate_rounded  gates and ups [M, 2 I], how -> silu of the one times the other [M, I], rounded to FP8
    gates   whether the product of gates and ups can be silu of the one times the other
    """

    pack: Callable[[GroupQuantized, bool], Any]
    linear: Callable[[Any, Any, Tensor | None, torch.dtype, Tensor | None], Tensor]
    gather: Callable[[Tensor, Tensor], Tensor]
    lookup: Callable[[Tensor, Any], Tensor]
    width: Callable[[Any], int]
    element_bytes: Callable[[Format], float]
    gates: bool
    rounding: Callable[[Any], RowRounding | None] = lambda _weight: None
    gate_rounded: Callable[[Tensor, RowRounding], RoundedRows] | None = None


NATIVE = QuantizedKernels(
    pack=lambda matrix, gated: ops.pack_quantized(matrix, gated=gated),
    linear=ops.quantized_linear,
    gather=ops.gather_columns,
    lookup=ops.embedding_quantized,
    width=lambda weight: weight.width,
    element_bytes=lambda form: form.element_bytes,
    gates=True,
)


def quantized_kernels(dtype: torch.dtype, device: torch.device) -> QuantizedKernels | None:
    """Returns the kernels for a model of `dtype` on `device`; None where there are none."""
    if triton_runs(device):
        return triton_kernels(dtype, device)
    return NATIVE if device.type == "cpu" and dtype == torch.bfloat16 and native.load() is not None else None


def triton_kernels(dtype: torch.dtype, device: torch.device) -> QuantizedKernels:
    from starling_engine.kernels import activation, coded_weight, gather_columns, quantized_linear, scaled_linear, scaled_weight
    from starling_engine.kernels.scaled_weight import ScaledWeight

    cores = capability(device)

    def pack(matrix: GroupQuantized, _gated: bool) -> Any:
        if rounds(matrix.format, dtype, cores):
            return scaled_weight.pack_scaled(matrix, device)
        return coded_weight.pack_codes(matrix, device)

    def linear(x: Any, weight: Any, *rest: Any) -> Tensor:
        if isinstance(weight, ScaledWeight):
            return scaled_linear.scaled_linear(x, weight, *rest)
        return quantized_linear.quantized_linear(x, weight, *rest)

    def lookup(ids: Tensor, weight: Any) -> Tensor:
        if isinstance(weight, ScaledWeight):
            return scaled_weight.scaled_numbers(ids, weight, dtype)
        return coded_weight.dequantized_rows(ids, weight, dtype)

    return QuantizedKernels(
        pack=pack,
        linear=linear,
        gather=gather_columns.gather_columns,
        lookup=lookup,
        width=lambda weight: weight.n,
        element_bytes=lambda form: scaled_bytes(form) if rounds(form, dtype, cores) else coded_weight.element_bytes(form),
        gates=False,
        rounding=lambda weight: weight.rounding if isinstance(weight, ScaledWeight) else None,
        gate_rounded=activation.silu_mul_rounded,
    )
