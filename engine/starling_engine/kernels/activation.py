"""The activation of a gated MLP, which may round its result to FP8.

Bound by memory: reads the halves of gate and up once, writes their product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.round_rows import row_shape, store_rounded
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding, empty_rows

LANES = 32
PER_THREAD = 8  # elements: one load of 16 bytes of each half in bf16, two in fp32
MAX_BLOCK = 1024  # four warps' worth; more programs, rather than larger ones, hide the latency


@triton.jit
def _silu_mul_rows(gate_up, out, size, BLOCK: tl.constexpr):
    """Each program computes BLOCK elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=here, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=here, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded to the tensors' type before the product, as two operations would be.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * size + column, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=here)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]: silu of the first half times the second, in fp32. fp32, fp16 or bf16. See `native.reference`.

    Moves 3 T I elements.
    """
    rows, both = gate_up.shape
    assert gate_up.dtype in (torch.float32, torch.float16, torch.bfloat16) and gate_up.is_contiguous() and both % 2 == 0
    size = both // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return out
    block = row_block(size)
    _silu_mul_rows[(rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=row_warps(block))
    return out


@triton.jit(do_not_specialize=["rows"])
def _silu_mul_rounded(
    gate_up, out, scales, static, rows, SIZE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program holds ROWS rows of SIZE gates, and as many ups."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * (2 * SIZE) + column[None, :]
    here = (row < rows)[:, None] & (column < SIZE)[None, :]
    gate = tl.load(gate_up + at, mask=here, other=0.0)
    up = tl.load(gate_up + SIZE + at, mask=here, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    store_rounded(product.to(tl.float32), out, scales, static, row, row < rows, SIZE, GROUP)


def silu_mul_rounded(gate_up: Tensor, rounding: RowRounding) -> RoundedRows:
    """Does as `silu_mul`, and rounds the result to FP8."""
    rows, both = gate_up.shape
    assert gate_up.is_contiguous() and both % 2 == 0
    size = both // 2
    out = empty_rows(rows, size, rounding, gate_up.dtype, gate_up.device)
    if rows == 0:
        return out
    block, rows_each, warps = row_shape(size)
    _silu_mul_rounded[(triton.cdiv(rows, rows_each),)](
        gate_up,
        out.codes,
        out.scales,
        rounding.scale,
        rows,
        SIZE=size,
        GROUP=rounding.group,
        ROWS=rows_each,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def row_block(size: int) -> int:
    """Returns the power of two that holds `size`, at most MAX_BLOCK."""
    block: int = triton.next_power_of_2(size)
    return min(MAX_BLOCK, block)


def row_warps(block: int) -> int:
    return max(1, block // (LANES * PER_THREAD))
