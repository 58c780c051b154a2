"""Keys and values in float8_e4m3fn (arXiv 2209.05433): divided by a scale, and clamped to the largest number."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def cached(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Returns x as a cache of `dtype` holds it: float8_e4m3fn, or x's own dtype, without a scale."""
    if dtype != FP8:
        return x
    most = torch.finfo(FP8).max
    return (x.float() / scale).clamp(-most, most).to(FP8)
