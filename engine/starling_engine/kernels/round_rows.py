"""Rounds rows of activations to FP8, as `rounded_in_torch` defines it. Other kernels round what they make by the same function."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding, empty_rows
from starling_engine.native.group_quantized import FP8_LARGEST, NOTHING

LARGEST = tl.constexpr(FP8_LARGEST)
LEAST = tl.constexpr(NOTHING)

LANES = 32
PER_THREAD = 16  # elements: two loads of 16 bytes in flight in bf16, four in fp32
MIN_WARPS, MAX_WARPS = 4, 32


@triton.jit
def store_rounded(values, codes, scales, static, row, live, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Stores values [ROWS, BLOCK] fp32, 0 past SIZE columns, as codes [M, SIZE] and scales, in the rows `row` [ROWS] that are live.

    GROUP columns share a scale, or with 0 all of a row; then `static` may be the scale of all.
    """
    BLOCK: tl.constexpr = values.shape[1]
    column = tl.arange(0, BLOCK)
    if GROUP > 0:
        GROUPS: tl.constexpr = BLOCK // GROUP
        group = tl.arange(0, GROUPS)
        grouped = tl.reshape(values, [values.shape[0], GROUPS, GROUP])
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 2), LEAST), LARGEST)
        coded = tl.reshape(tl.div_rn(grouped, tl.broadcast_to(scale[:, :, None], grouped.shape)), values.shape)
        at = row.to(tl.int64)[:, None] * (SIZE // GROUP) + group[None, :]
        tl.store(scales + at, scale, mask=live[:, None] & (group < SIZE // GROUP)[None, :])
    else:
        if static is None:
            scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), LEAST), LARGEST)
        else:
            scale = tl.zeros([values.shape[0]], tl.float32) + tl.load(static)
        coded = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
        tl.store(scales + row, scale, mask=live)
    held = tl.clamp(coded, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    codes_at = codes + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(codes_at, held.to(codes.dtype.element_ty), mask=live[:, None] & (column < SIZE)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _round_rows(
    x, codes, scales, static, rows, stride, SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program holds ROWS rows of SIZE elements in registers (BLOCK is the power of two that holds one row)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < SIZE)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=here, other=0.0)
    store_rounded(values.to(tl.float32), codes, scales, static, row, row < rows, SIZE, GROUP)


def round_rows(x: Tensor, rounding: RowRounding) -> RoundedRows:
    """x [M, K] in bf16, fp16 or fp32; its rows may be strided. Reads each element once."""
    rows, size = x.shape
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.stride(1) == 1
    out = empty_rows(rows, size, rounding, x.dtype, x.device)
    if rows == 0:
        return out
    block, rows_each, warps = row_shape(size)
    _round_rows[(triton.cdiv(rows, rows_each),)](
        x,
        out.codes,
        out.scales,
        rounding.scale,
        rows,
        x.stride(0),
        SIZE=size,
        GROUP=rounding.group,
        ROWS=rows_each,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def row_shape(size: int) -> tuple[int, int, int]:
    """Returns (block, rows of a program, warps) for rows of `size` elements.

    A thread has PER_THREAD elements, so that one row's loads are all in flight at once. Rows too short for MIN_WARPS share a
    program. Rows of more than 16,384 (MAX_WARPS) take more registers a thread; from 32,768 of fp32 on they spill.
    """
    block = triton.next_power_of_2(size)
    rows = max(1, MIN_WARPS * LANES * PER_THREAD // block)
    warps = min(MAX_WARPS, max(MIN_WARPS, block // (LANES * PER_THREAD)))
    return block, rows, warps
