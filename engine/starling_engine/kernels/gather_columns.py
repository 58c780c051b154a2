"""Rows with their columns in another order, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_AT_ONCE = 1024


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """x [M, K] (rows may be strided), order [K'] int32 -> [M, K']: column i is column order[i], or 0 where that is below 0."""
    assert x.stride(1) == 1 and order.is_contiguous()
    out = torch.empty(x.shape[0], order.shape[0], dtype=x.dtype, device=x.device)
    if len(x):
        width = order.shape[0]
        _gather_columns[(len(x), triton.cdiv(width, COLUMNS_AT_ONCE))](
            x, order, out, x.stride(0), WIDTH=width, COLUMNS=COLUMNS_AT_ONCE
        )
    return out


@triton.jit
def _gather_columns(x, order, out, x_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    source = tl.load(order + column, mask=inside, other=-1)
    tl.store(out + row * WIDTH + column, tl.load(x + row * x_stride + source, mask=source >= 0, other=0.0), mask=inside)
