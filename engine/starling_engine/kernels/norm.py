"""RMSNorm of rows, which also adds the residual. Bound by memory: each element is read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 32
PER_THREAD = 16  # elements: two loads of 16 bytes in flight in bf16, four in fp32
MIN_WARPS, MAX_WARPS = 4, 32


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_rows(
    x, residual, weight, out, rows, eps, SIZE: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program holds ROWS rows of SIZE elements in registers (BLOCK is the power of two that holds one row)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    here = (row < rows)[:, None] & (column < SIZE)[None, :]
    values = tl.load(x + at, mask=here, other=0.0)
    if ADD:
        # Rounded to the residual's type before the norm: the next layer adds to the rounded value.
        values = (values.to(tl.float32) + tl.load(residual + at, mask=here, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(residual + at, values, mask=here)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normal = (wide * scale[:, None]).to(weight.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(out + at, (normal * weights[None, :]).to(values.dtype), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, K] / rms(x) * weight [K] -> out [T, K], which may be x. fp32, fp16 or bf16, the weight that or fp32; sums in fp32.

    See `native.reference`. Moves 2 T K elements.
    """
    _launch(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x, in place; then residual / rms(residual) * weight [K] -> out [T, K], which may be x.

    Moves 4 T K elements.
    """
    assert residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
    _launch(x, residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    rows, size = x.shape
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.dtype == out.dtype
    assert weight.dtype in (x.dtype, torch.float32)
    assert x.shape == out.shape and weight.shape == (size,)
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    if rows == 0:
        return
    block, rows_each, warps = row_shape(size)
    added = x if residual is None else residual
    _rms_norm_rows[(triton.cdiv(rows, rows_each),)](
        x,
        added,
        weight,
        out,
        rows,
        eps,
        SIZE=size,
        ADD=residual is not None,
        ROWS=rows_each,
        BLOCK=block,
        num_warps=warps,
    )


def row_shape(size: int) -> tuple[int, int, int]:
    """Returns (block, rows of a program, warps) for rows of `size` elements.

    A thread has PER_THREAD elements, so that one row's loads are all in flight at once. Rows too short for MIN_WARPS share a
    program. Rows of more than 16,384 (MAX_WARPS) take more registers a thread; from 32,768 of fp32 on they spill.
    """
    block = triton.next_power_of_2(size)
    rows = max(1, MIN_WARPS * LANES * PER_THREAD // block)
    warps = min(MAX_WARPS, max(MIN_WARPS, block // (LANES * PER_THREAD)))
    return block, rows, warps
