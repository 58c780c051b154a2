"""Torch's matmuls, in float32 where a CPU has no instructions for those of bfloat16 or float16.

Torch emulates those: on a CPU with AVX2 alone, a bfloat16 linear of 256 rows takes 4 times as long, a bmm 50 times.
"""

import functools
import logging

import torch
from torch.nn import functional as F

logger = logging.getLogger("starling.layers")

MAX_EMULATED_ROWS = 4
"""Most rows for which emulation is faster than conversion of the weights to float32: 2.4 ms against 4.6 at one row, equal at 5."""
SCRATCH_ELEMENTS = 1 << 20
"""Elements of a weight that are converted to float32 at a time: 4 MiB. Smaller pieces are slower, larger ones no faster."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N], all of one dtype."""
    if x.shape[0] <= MAX_EMULATED_ROWS or not is_emulated(x.dtype, x.device.type):
        return F.linear(x, weight, bias)
    x_fp32, out = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    rows = max(1, SCRATCH_ELEMENTS // weight.shape[1])
    scratch = torch.empty(min(rows, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        columns = slice(start, start + rows)
        piece = weight[columns]
        out[:, columns] = _fp32_linear(x_fp32, scratch[: len(piece)].copy_(piece), None if bias is None else bias[columns].float())
    return out


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """x [T, K], weight [N, K], both of a dtype that `sums_in_fp32` -> out [T, N] fp32: sums that are not rounded in between."""
    torch.mm(x, weight.t(), torch.float32, out=out)


@functools.cache
def sums_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether there is `linear_fp32`: on a GPU, for bf16 and fp16. It is tried once, for torch may have none."""
    if device.type not in ("cuda", "meta") or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones, out = torch.ones(16, 16, dtype=dtype, device=device), torch.empty(16, 16, dtype=torch.float32, device=device)
    try:
        linear_fp32(ones, ones, out)
    except (TypeError, RuntimeError) as error:
        logger.warning(
            "products of %s are rounded, and then widened: torch %s has none in fp32 (%s)", dtype, torch.__version__, error
        )
        return False
    return True


def bmm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, T, K], weight [B, K, N] -> [B, T, N], all of one dtype."""
    if not is_emulated(x.dtype, x.device.type):
        return torch.bmm(x, weight)
    return torch.bmm(x.float(), weight.float()).to(x.dtype)


@functools.cache
def is_emulated(dtype: torch.dtype, device_type: str) -> bool:
    """Returns whether torch emulates matmuls of `dtype` on such a device."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return not (has_mkldnn_bf16() if dtype == torch.bfloat16 else _has_mkldnn_fp16())


def has_mkldnn_bf16() -> bool:
    return has_mkldnn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_mkldnn_fp16() -> bool:
    return has_mkldnn() and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@functools.cache
def has_mkldnn() -> bool:
    """Returns whether torch has oneDNN. Builds for other processors may lack it, and its functions that check dtypes."""
    built_in: bool = torch.backends.mkldnn.is_available()
    return built_in


def _fp32_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiplies by oneDNN, which is 1.1 to 2 times as fast in float32 as F.linear."""
    if not has_mkldnn():
        return F.linear(x, weight, bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
