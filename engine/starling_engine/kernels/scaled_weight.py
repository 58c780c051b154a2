"""Matrices of FP8 that are multiplied by rows of FP8: how they lie, and the product of two tiles."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.fp8 import kept_rows
from starling_engine.kernels.rounded_rows import RowRounding
from starling_engine.model_config.quantization import ROUNDED_GROUP
from starling_engine.native.group_quantized import Format, GroupQuantized


@dataclass(frozen=True)
class ScaledWeight:
    """A matrix [N, K], or those of S experts, one behind the other.

    codes       [N, K] float8_e4m3fn, or [S, N, K]
    scales      fp32: [N], or [N / block_rows, K / 128]; or [S, ...]
    block_rows  rows that have their scales once; 0: each row has one for all its columns
    one_scale   all of it has the same
    """

    codes: Tensor
    scales: Tensor
    format: Format
    block_rows: int
    rounding: RowRounding
    one_scale: bool = False

    @property
    def n(self) -> int:
        return self.codes.shape[-2]

    @property
    def k(self) -> int:
        return self.codes.shape[-1]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scales]


def pack_scaled(matrix: GroupQuantized, device: torch.device) -> ScaledWeight:
    """Takes one that `fp8.rounds`."""
    form, (n, _) = matrix.format, matrix.codes.shape
    codes = matrix.codes.view(torch.float8_e4m3fn).to(device)
    rounding = RowRounding(form.rounding, None if matrix.input_scale is None else matrix.input_scale.to(device))
    if form.by_row:
        scales = matrix.scales[:, 0].contiguous()
        return ScaledWeight(codes, scales.to(device), form, 0, rounding, one_scale=_all(scales == scales[0], unknown=False))
    scales, rows = matrix.scales[:, :: ROUNDED_GROUP // form.group], 1
    if kept_rows(form) > 1 and n % ROUNDED_GROUP == 0:
        blocks = scales.unflatten(0, (-1, ROUNDED_GROUP))
        if _all(blocks == blocks[:, :1], unknown=True):  # else a part of the matrix begins within a block
            scales, rows = blocks[:, 0], ROUNDED_GROUP
    return ScaledWeight(codes, scales.contiguous().to(device), form, rounding=rounding, block_rows=rows)


def _all(found: Tensor, *, unknown: bool) -> bool:
    """Says whether all is true; `unknown` where tensors are shapes alone."""
    return unknown if found.is_meta else bool(found.all())


def empty_scaled(experts: int, n: int, k: int, form: Format, block_rows: int, device: torch.device) -> ScaledWeight:
    """Reserves memory for the matrices [n, k] of experts. A static scale of rows is left out: each row has one of its own."""
    codes = torch.empty(experts, n, k, dtype=torch.float8_e4m3fn, device=device)
    shape = (experts, n) if form.by_row else (experts, n // block_rows, k // ROUNDED_GROUP)
    rounding = RowRounding("token" if form.rounding == "static" else form.rounding)
    scales = torch.empty(shape, dtype=torch.float32, device=device)
    return ScaledWeight(codes, scales, form, 0 if form.by_row else block_rows, rounding)


def scaled_numbers(ids: Tensor, weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """Returns the rows ids [T] int64 -> [T, K] of `dtype`."""
    codes = weight.codes.view(torch.uint8)[ids].view(torch.float8_e4m3fn).float()
    if not weight.block_rows:
        return (codes * weight.scales[ids][:, None]).to(dtype)
    return (codes * weight.scales[ids // weight.block_rows].repeat_interleave(ROUNDED_GROUP, 1)).to(dtype)


GROUP = tl.constexpr(ROUNDED_GROUP)


@triton.jit
def dot_scaled(
    sums,
    x_at,
    x_scales_at,
    live,
    codes_at,
    scales_at,
    first,
    DEPTH: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    X_GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Adds to sums [ROWS, COLUMNS] the products of the columns from `first` on, TILE_DEPTH of them at most.

    TILE_DEPTH is GROUP where any scale is of a group. x_at [ROWS, 1] are rows of codes, of which `live` [ROWS, 1] are read, and
    codes_at [1, COLUMNS] the matrix's. Scales of groups are at x_scales_at [ROWS, 1] and scales_at [1, COLUMNS]. Tensor cores of
    Hopper sum FP8 in fewer bits than fp32 has, so they sum no more than a tile.
    """
    column = first + tl.arange(0, TILE_DEPTH)
    if DEPTH % TILE_DEPTH == 0:
        left = tl.load(x_at + column[None, :], mask=live, other=0.0)
        right = tl.load(codes_at + column[:, None])
    else:
        left = tl.load(x_at + column[None, :], mask=live & (column < DEPTH)[None, :], other=0.0)
        right = tl.load(codes_at + column[:, None], mask=(column < DEPTH)[:, None], other=0.0)
    part = tl.dot(left, right)
    if X_GROUPED:
        part *= tl.load(x_scales_at + first // GROUP, mask=live, other=0.0)
    if BLOCK_ROWS > 0:
        part *= tl.load(scales_at + first // GROUP)
    return sums + part


@triton.jit
def of_whole_rows(sums, x_scales_at, scales_at, live, X_GROUPED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Multiplies sums by the scales that rows have for all their columns."""
    if not X_GROUPED:
        sums *= tl.load(x_scales_at, mask=live, other=0.0)
    if BLOCK_ROWS == 0:
        sums *= tl.load(scales_at)
    return sums
