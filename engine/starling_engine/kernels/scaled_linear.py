"""The product of rows with a matrix, both in FP8, on a GPU: by `torch._scaled_mm`, or by a kernel of its own (see `fp8`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.fp8 import Product, product_of
from starling_engine.kernels.grouped import ProgramTile
from starling_engine.kernels.round_rows import round_rows
from starling_engine.kernels.rounded_rows import RoundedRows
from starling_engine.kernels.scaled_weight import ScaledWeight, dot_scaled, of_whole_rows
from starling_engine.platforms.triton_support import capability


def scaled_tile(rows: int, *, in_groups: bool) -> tuple[int, ProgramTile]:
    """Returns the rows of x of a program, and its tile. A block fits on an Ada, too. Nothing here was timed on a GPU."""
    if rows <= 16:
        # Bound by the bytes of codes: 4,096 rows of a matrix make 128 programs, each of which has 28 or 40 KiB of them in flight.
        return 16, ProgramTile(32, 128, 4, 8) if in_groups else ProgramTile(32, 256, 4, 6)
    return (64, ProgramTile(64, 128, 4, 5)) if rows <= 64 else (128, ProgramTile(128, 128, 8, 3))


def scaled_linear(
    x: Tensor | RoundedRows,
    weight: ScaledWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies x [M, K] by the weight, plus bias [N] -> [M, N]. Rows that are not rounded yet are; theirs may be strided.

    The result is of `out_dtype`, or else of x's; or it is written to `out`, whose rows may be strided. Sums are fp32.
    """
    rows, depth = x.shape
    assert depth == weight.k and (bias is None or bias.is_contiguous())
    dtype = out_dtype or x.dtype if out is None else out.dtype
    if rows == 0:
        return torch.empty(0, weight.n, dtype=dtype, device=x.device) if out is None else out
    rounded = x if isinstance(x, RoundedRows) else round_rows(x, weight.rounding)
    cores = capability(x.device)
    product = product_of(weight.format, weight.n, depth, rows, x.dtype, dtype, cores, one_scale=weight.one_scale)
    if product == "triton":
        return _by_triton(rounded, weight, bias, torch.empty(rows, weight.n, dtype=dtype, device=x.device) if out is None else out)
    found = _by_torch(rounded, weight, bias, dtype, product)
    return found if out is None else out.copy_(found)


def _by_torch(x: RoundedRows, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype, product: Product) -> Tensor:
    left, right = x.scales, weight.scales[None, :]
    if product == "by tensor":
        assert weight.rounding.scale is not None, "rows have scales of their own"
        left, right = weight.rounding.scale, weight.scales[:1].reshape(())
    out: Tensor = torch._scaled_mm(x.codes, weight.codes.t(), left, right, bias=bias, out_dtype=dtype)
    return out


def _by_triton(x: RoundedRows, weight: ScaledWeight, bias: Tensor | None, out: Tensor) -> Tensor:
    (rows, depth), groups = x.shape, x.scales.shape[1]
    assert out.shape == (rows, weight.n) and out.stride(1) == 1
    tile_rows, tile = scaled_tile(rows, in_groups=groups > 1 or weight.block_rows > 0)
    _scaled_linear[(triton.cdiv(rows, tile_rows) * triton.cdiv(weight.n, tile.columns),)](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        bias,
        out,
        rows,
        out.stride(0),
        DEPTH=depth,
        WIDTH=weight.n,
        ROWS=tile_rows,
        COLUMNS=tile.columns,
        TILE_DEPTH=tile.depth,
        X_GROUPED=weight.rounding.group > 0,
        BLOCK_ROWS=weight.block_rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _scaled_linear(
    x,
    x_scales,
    codes,
    scales,
    bias,
    out,
    rows,
    out_stride,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    X_GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Program (tile of rows, tile of columns). Tiles of rows that read the same codes are neighbours."""
    tiles = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    column = program // tiles * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * DEPTH
    # Columns past the end read the last one: cheaper than a mask, and never stored.
    real = tl.minimum(column, WIDTH - 1)
    codes_at = codes + real.to(tl.int64)[None, :] * DEPTH
    x_scales_at = x_scales + row.to(tl.int64)[:, None] * (DEPTH // 128 if X_GROUPED else 1)
    scales_at = scales + (real // BLOCK_ROWS * (DEPTH // 128) if BLOCK_ROWS > 0 else real)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, DEPTH, TILE_DEPTH):
        sums = dot_scaled(sums, x_at, x_scales_at, live, codes_at, scales_at, first, DEPTH, TILE_DEPTH, X_GROUPED, BLOCK_ROWS)
    sums = of_whole_rows(sums, x_scales_at, scales_at, live, X_GROUPED, BLOCK_ROWS)
    if bias is not None:
        sums += tl.load(bias + real).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=live & (column < WIDTH)[None, :])
