"""Matrix products by torch, in float32 where a CPU has no products of a half dtype.

Torch emulates those: on a CPU with AVX2 alone, products of bfloat16 with 256 rows take 4 times as long, batched ones 50 times.
"""

import functools

import torch
from torch.nn import functional as F

FEW_ROWS = 4
"""Rows up to which torch reads the half weights themselves: 2.4 ms at one row where widening takes 4.6, and equal at 5."""
SCRATCH = 1 << 20
"""Elements of a weight that are widened at a time: 4 MiB. Smaller pieces are slower, larger ones no faster."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], all of one dtype."""
    if x.shape[0] <= FEW_ROWS or not is_emulated(x.dtype, x.device.type):
        return F.linear(x, weight, bias)
    wide, out = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    rows = max(1, SCRATCH // weight.shape[1])
    scratch = torch.empty(min(rows, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        own = slice(start, start + rows)
        piece = weight[own]
        out[:, own] = _wide_linear(wide, scratch[: len(piece)].copy_(piece), None if bias is None else bias[own].float())
    return out


def bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, T, K], weight [B, K, N] -> [B, T, N], all of one dtype."""
    if not is_emulated(x.dtype, x.device.type):
        return torch.bmm(x, weight)
    return torch.bmm(x.float(), weight.float()).to(x.dtype)


@functools.cache
def is_emulated(dtype: torch.dtype, device_type: str) -> bool:
    """Returns whether torch lacks fast products of `dtype` there."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return not (has_mkldnn_bf16() if dtype == torch.bfloat16 else _has_mkldnn_fp16())


def has_mkldnn_bf16() -> bool:
    return _has_mkldnn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_mkldnn_fp16() -> bool:
    return _has_mkldnn() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@functools.cache
def _has_mkldnn() -> bool:
    """Returns whether torch has oneDNN. Builds for other processors may lack it, and its functions that check dtypes."""
    built_in: bool = torch.backends.mkldnn.is_available()
    return built_in


def _wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiplies by oneDNN, which is 1.1 to 2 times as fast in float32 as F.linear."""
    if not _has_mkldnn():
        return F.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
