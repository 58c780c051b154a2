"""Rows with their columns in another order, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_AT_ONCE = 1024


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """x [M, K] (rows may be strided), order [K'] int32 -> [M, K']: column i is column order[i], or 0 where that is below 0."""
    return _gather(x, order, None, len(x), 1)


def gather_columns_of_slots(x: Tensor, orders: Tensor, slots: Tensor, rows_each: int) -> Tensor:
    """Does so with an order for each slot: orders [S, K'] int32, slots [P] -> [P, K'].

    Row i is row i // `rows_each` of x, in the order of slots[i]. Rows of the slot S are undefined.
    """
    return _gather(x, orders, slots, len(slots), rows_each)


def _gather(x: Tensor, orders: Tensor, slots: Tensor | None, rows: int, rows_each: int) -> Tensor:
    assert x.stride(1) == 1 and orders.is_contiguous()
    width = orders.shape[-1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        grid = rows, triton.cdiv(width, COLUMNS_AT_ONCE)
        _gather_columns[grid](x, orders, slots, out, x.stride(0), len(orders), EACH=rows_each, WIDTH=width, COLUMNS=COLUMNS_AT_ONCE)
    return out


@triton.jit(do_not_specialize=["num_slots"])
def _gather_columns(x, orders, slots, out, x_stride, num_slots, EACH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    order_at = orders + column
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
        inside = inside & (slot < num_slots)
        order_at += slot * WIDTH
    source = tl.load(order_at, mask=inside, other=-1)
    found = tl.load(x + row // EACH * x_stride + source, mask=source >= 0, other=0.0)
    tl.store(out + row * WIDTH + column, found, mask=inside)
