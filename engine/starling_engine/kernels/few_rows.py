"""The product of a few rows with a matrix as it lies, with the norm before it, and the gate or the residual behind it.

Bound by the matrix's bytes: each is read once, by copies of 16 bytes that are asked for three tiles ahead. A program has the whole
depth of its columns, so its sums have one order. Columns alone make enough programs. If the depth were split, too, sums would go
through memory and wait for the last program: an estimated 2 us, as much as it would save.

The norm takes no launch and no time before the first copy. It is x * weight / rms(x), and a row's rms is known when all of it was
read: so rows are multiplied by `weight` tile by tile, and the sums by 1 / rms(x) in the end. What is rounded between them differs
from `norm.rms_norm`; the sums are as exact.

On Hopper a program asks for its part of the matrix before the launch before it has ended: see `overlap`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.coded_rows import load_tile
from starling_engine.kernels.fused_rows import MOST_ROWS, RowNorm
from starling_engine.kernels.grouped import ProgramTile
from starling_engine.kernels.overlap import ask_for, begin_after, overlaps
from starling_engine.platforms.triton_support import sms

NARROW_ROWS = 8
"""Most rows for which columns may be few: programs of 16 columns read 16 rows as often as the matrix, though from the L2 cache."""

THREADS = tl.constexpr(128)
"""Threads of a program."""

AHEAD = tl.constexpr(1024)
"""Bytes of each matrix row that the L2 cache is asked for while the launch before ends: 32 KiB a program, or 16."""


def few_rows_tile(rows: int, columns: int, processors: int, *, normed: bool) -> ProgramTile:
    """Returns the tile of a program for a matrix of so many columns, on so many SMs. Nothing here was timed on a GPU.

    Each program multiplies the rows by the norm's weight, so that there are fewer of those. Where there are less programs than SMs,
    each asks for more at once. A block takes 80 KiB of shared memory at most: an Ada has 99.
    """
    if normed or rows > NARROW_ROWS:
        return ProgramTile(32, 256, 4, 4)
    return ProgramTile(16, 256, 4, 4 if triton.cdiv(columns, 16) >= processors else 6)


@triton.jit
def products(
    x,
    norm,
    weight,
    bias,
    column,
    rows,
    eps,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Returns the products [ROWS, COLUMNS] fp32 of x [rows, DEPTH], or its norm, with the matrix's rows `column`; adds the bias."""
    ROW_BYTES: tl.constexpr = DEPTH * weight.dtype.element_ty.primitive_bitwidth // 8
    if OVERLAPS and ROW_BYTES % 16 == 0 and ROW_BYTES >= AHEAD:
        ask_for(weight + column.to(tl.int64) * DEPTH, AHEAD, THREADS // column.shape[0])
    begin_after(OVERLAPS)
    row = tl.arange(0, ROWS)
    x_at = x + row[:, None] * DEPTH
    weight_at = weight + column.to(tl.int64)[None, :] * DEPTH
    sums = tl.zeros([ROWS, column.shape[0]], tl.float32)
    squares = tl.zeros([ROWS, TILE_DEPTH], tl.float32)
    UNEVEN: tl.constexpr = DEPTH % TILE_DEPTH > 0
    for first in range(0, DEPTH, TILE_DEPTH):
        at = first + tl.arange(0, TILE_DEPTH)
        values = load_tile(x_at + at[None, :], row < rows, at < DEPTH, True, UNEVEN)
        if norm is not None:
            wide = values.to(tl.float32)
            squares += wide * wide
            weights = load_tile(norm + at[None, :], row < rows, at < DEPTH, False, UNEVEN)
            values = (wide * weights.to(tl.float32)).to(values.dtype)
        matrix = load_tile(weight_at + at[:, None], at < DEPTH, column >= 0, UNEVEN, False)
        sums = tl.dot(values, matrix, sums, input_precision=PRECISION)
    if norm is not None:
        sums *= tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 1) / DEPTH + eps))[:, None]
    if bias is not None:
        sums += tl.load(bias + column).to(tl.float32)[None, :]
    return sums


@triton.jit
def halves(sums):
    """Splits [ROWS, COLUMNS] into its first columns and its last."""
    HALF: tl.constexpr = sums.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(sums, [sums.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x,
    norm,
    weight,
    bias,
    out,
    rows,
    eps,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (tile of columns). With ADD the products are added to what `out` has.

    GATED: the matrix has WIDTH rows of gates, and as many of up. A program takes the same of both.
    """
    row = tl.arange(0, ROWS)
    place = tl.arange(0, COLUMNS)
    OWN: tl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    first_column = tl.program_id(0) * OWN
    # Columns past the end read the last one: cheaper than a mask, and never stored.
    column = tl.minimum(first_column + place % OWN, WIDTH - 1) + place // OWN * WIDTH
    sums = products(x, norm, weight, bias, column, rows, eps, DEPTH, ROWS, TILE_DEPTH, PRECISION, OVERLAPS)
    if GATED:
        gate, up = halves(sums)
        sums = gate / (1.0 + tl.exp(-gate)) * up
    own = first_column + tl.arange(0, OWN)
    out_at = out + row[:, None] * WIDTH + own[None, :]
    here = (row < rows)[:, None] & (own < WIDTH)[None, :]
    if ADD:
        sums += tl.load(out_at, mask=here, other=0.0).to(tl.float32)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=here)


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: RowNorm | None = None,
    *,
    gated: bool = False,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies x [M, K], M <= MOST_ROWS, or its norm, by weight [N, K], and adds bias [N] -> [M, N]. Sums are fp32, rounded once.

    Where `gated`, the result is silu(first half) * second half, [M, N / 2]. With `add_to` [M, N] it is added to that, in place,
    which is returned; it is not x. All are of one dtype, bf16 or fp32: in fp16, x times the norm's weight may be too large.
    With `out` [M, N] it is written there, which may be of fp32 in any case.
    """
    rows, depth = x.shape
    width = len(weight) // 2 if gated else len(weight)
    assert 0 < rows <= MOST_ROWS and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32)
    assert weight.shape[1] == depth and all(each is None or each.is_contiguous() for each in (x, weight, bias, add_to))
    assert norm is None or (norm.weight.shape == (depth,) and norm.weight.dtype in (x.dtype, torch.float32))
    assert add_to is None or (add_to.shape == (rows, width) and add_to.dtype == x.dtype and out is None)
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if add_to is None else add_to
    assert out.shape == (rows, width) and out.is_contiguous() and out.dtype in (x.dtype, torch.float32)
    tile = few_rows_tile(rows, len(weight), sms(x.device), normed=norm is not None)
    _few_rows[(triton.cdiv(len(weight), tile.columns),)](
        x,
        None if norm is None else norm.weight,
        weight,
        bias,
        out,
        rows,
        0.0 if norm is None else norm.eps,
        DEPTH=depth,
        WIDTH=width,
        ROWS=MOST_ROWS,
        COLUMNS=tile.columns,
        TILE_DEPTH=tile.depth if x.dtype == torch.bfloat16 else tile.depth // 4,
        GATED=gated,
        ADD=add_to is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        OVERLAPS=overlaps(x.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=overlaps(x.device),
    )
    return out
