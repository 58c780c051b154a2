"""The product of rows with a matrix in 2 to 8 bits, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.coded_weight import CodedWeight, dot_codes
from starling_engine.kernels.grouped import ProgramTile


def linear_tile(rows: int, dtype: torch.dtype) -> tuple[int, ProgramTile]:
    """Returns the rows of x of a program, and its tile. Nothing here was timed on a GPU."""
    if dtype == torch.float32:
        return 16, ProgramTile(32, 64, 4, 2)
    if rows <= 16:
        # Bound by the bytes of codes: 4,096 rows of a matrix make 128 programs.
        return 16, ProgramTile(32, 128, 4, 4)
    return (64, ProgramTile(64, 128, 4, 3)) if rows <= 64 else (128, ProgramTile(128, 128, 8, 2))


def quantized_linear(
    x: Tensor, weight: CodedWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiplies x [M, K] (bf16, fp16 or fp32; rows may be strided) by the weight, plus bias [N] -> [M, N].

    The result is of `out_dtype`, or else of x's; or it is written to `out`, whose rows may be strided. Sums are fp32.
    """
    rows, depth = x.shape
    assert depth == weight.k and x.stride(1) == 1 and (bias is None or bias.is_contiguous())
    out = torch.empty(rows, weight.n, dtype=out_dtype or x.dtype, device=x.device) if out is None else out
    assert out.shape == (rows, weight.n) and out.stride(1) == 1
    if rows == 0:
        return out
    tile_rows, tile = linear_tile(rows, x.dtype)
    _linear[(triton.cdiv(rows, tile_rows) * triton.cdiv(weight.n, tile.columns),)](
        x,
        weight.codes,
        *weight.sides,
        bias,
        out,
        rows,
        x.stride(0),
        out.stride(0),
        DEPTH=depth,
        WIDTH=weight.n,
        ROWS=tile_rows,
        COLUMNS=tile.columns,
        TILE_DEPTH=tile.depth,
        **weight.constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    codes,
    scales,
    minima,
    table,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    PAIRED: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Program (tile of rows, tile of columns). Tiles of rows that read the same codes are neighbours."""
    tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    column = program // tiles * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * x_stride
    # Columns past the end read the last one: cheaper than a mask, and never stored.
    real = tl.minimum(column, WIDTH - 1)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, DEPTH, TILE_DEPTH):
        sums = dot_codes(
            sums, x_at, live, codes, scales, minima, table, real, first, DEPTH, TILE_DEPTH, KIND, PAIRED, UNIT, GROUP, ZERO
        )
    if bias is not None:
        sums += tl.load(bias + real).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=live & (column < WIDTH)[None, :])
