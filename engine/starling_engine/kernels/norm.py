"""RMSNorm of rows, which also adds the residual, and may round the result to FP8.

Bound by memory: each element is read and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.round_rows import row_shape, store_rounded
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding, empty_rows


@triton.jit
def store_normed(values, weights, out, scales, static, row, live, eps, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Stores the norm of values [ROWS, BLOCK] by weights [BLOCK], both 0 past SIZE columns, in out [M, SIZE].

    It has the rows `row` [ROWS] that are live. With `scales`, `static` and GROUP as in `store_rounded`, the result is rounded.
    """
    column = tl.arange(0, values.shape[1])
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / SIZE
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normal = (wide * scale[:, None]).to(weights.dtype).to(tl.float32)
    result = (normal * weights.to(tl.float32)[None, :]).to(values.dtype)
    if scales is None:
        at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(out + at, result, mask=live[:, None] & (column < SIZE)[None, :])
    else:
        store_rounded(result.to(tl.float32), out, scales, static, row, live, SIZE, GROUP)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_rows(
    x,
    residual,
    weight,
    out,
    scales,
    static,
    rows,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program holds ROWS rows of SIZE elements in registers (BLOCK is the power of two that holds one row)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    here = (row < rows)[:, None] & (column < SIZE)[None, :]
    values = tl.load(x + at, mask=here, other=0.0)
    weights = tl.load(weight + column, mask=column < SIZE, other=0.0)
    if ADD:
        # Rounded to the residual's type before the norm: the next layer adds to the rounded value.
        values = (values.to(tl.float32) + tl.load(residual + at, mask=here, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(residual + at, values, mask=here)
    store_normed(values, weights, out, scales, static, row, row < rows, eps, SIZE, GROUP)


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


def rms_norm_rounded(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rounding: RowRounding) -> RoundedRows:
    """Does as `rms_norm`, or with a residual as `add_rms_norm`, and rounds the result to FP8."""
    out = empty_rows(x.shape[0], x.shape[1], rounding, x.dtype, x.device)
    _launch(x, residual, weight, eps, out.codes, out.scales, rounding)
    return out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scales: Tensor | None = None,
    rounding: RowRounding | None = None,
) -> None:
    rows, size = x.shape
    assert x.dtype in (torch.float32, torch.float16, torch.bfloat16) and out.dtype in (x.dtype, torch.float8_e4m3fn)
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
        scales,
        None if rounding is None else rounding.scale,
        rows,
        eps,
        SIZE=size,
        ADD=residual is not None,
        GROUP=0 if rounding is None else rounding.group,
        ROWS=rows_each,
        BLOCK=block,
        num_warps=warps,
    )
