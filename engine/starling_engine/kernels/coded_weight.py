"""Matrices in 2 to 8 bits on a GPU: how their codes lie, and how kernels multiply by a tile of them.

Codes of 2 and 4 bits lie two in a byte: of each run of UNIT columns, the first half is in the low bits. Others have a byte each.
Kernels turn codes into numbers of x's dtype on the way. So products are those of the dequantized matrix, up to the order of sums.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.native.group_quantized import GROUPS, Format, GroupQuantized, numbers_of, table_of

PAIRED_BITS = (2, 4)


@dataclass(frozen=True)
class CodedWeight:
    """A matrix [N, K], or those of S experts, one behind the other.

    codes           [N, K / 2] uint8 where codes lie in pairs, else [N, K]; or [S, N, ...]
    scales, minima  [N, K / group] of the format's dtype, or [S, N, ...]
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    format: Format
    table: Tensor | None
    """Numbers of the format's table, fp32."""

    @property
    def n(self) -> int:
        return self.codes.shape[-2]

    @property
    def k(self) -> int:
        return self.codes.shape[-1] * (2 if _is_paired(self.format) else 1)

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.codes, self.scales, self.minima) if each is not None]

    @property
    def sides(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scales, minima and table, which kernels take behind the codes."""
        return self.scales, self.minima, self.table

    @functools.cached_property
    def constants(self) -> dict[str, int | str]:
        """Arguments that kernels are compiled for: see `dot_codes`."""
        form = self.format
        kind = "floats" if form.floats else "whole" if form.table is None else "table"
        return {"KIND": kind, "PAIRED": _is_paired(form), "UNIT": form.block, "GROUP": form.group, "ZERO": form.zero}


def gpu_format(form: Format) -> Format:
    """Returns the format with groups that kernels take: the largest of `GROUPS` that divides them."""
    return replace(form, group=next(size for size in GROUPS if form.group % size == 0))


def element_bytes(form: Format) -> float:
    """Bytes of a weight on a GPU, with its share of scale and minimum."""
    form = gpu_format(form)
    return replace(form, bits=4 if _is_paired(form) else 8).element_bytes


def pack_codes(matrix: GroupQuantized, device: torch.device) -> CodedWeight:
    form = gpu_format(matrix.format)
    codes = matrix.codes.to(device)
    repeats = matrix.format.group // form.group
    scales, minima = (
        None if each is None else each.to(device).repeat_interleave(repeats, 1) for each in (matrix.scales, matrix.minima)
    )
    assert scales is not None
    if _is_paired(form):
        low, high = codes.view(len(codes), -1, 2, form.block // 2).unbind(2)
        codes = (low | high << 4).flatten(1)
    return CodedWeight(codes, scales, minima, form, table_of(form, device))


def empty_codes(experts: int, n: int, k: int, form: Format, device: torch.device) -> CodedWeight:
    """Reserves memory for the matrices [n, k] of experts."""
    form = gpu_format(form)
    codes = torch.empty(experts, n, k // 2 if _is_paired(form) else k, dtype=torch.uint8, device=device)
    sides = [torch.empty(experts, n, k // form.group, dtype=form.scale_dtype, device=device) for _ in range(1 + form.minima)]
    return CodedWeight(codes, sides[0], sides[1] if form.minima else None, form, table_of(form, device))


def dequantized_rows(ids: Tensor, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the rows ids [T] int64 -> [T, K] of `dtype`."""
    form, codes = weight.format, weight.codes[ids]
    if _is_paired(form):
        halves = codes.unflatten(1, (-1, form.block // 2))
        codes = torch.stack([halves & 15, halves >> 4], 2).flatten(1)
    minima = None if weight.minima is None else weight.minima[ids]
    return numbers_of(codes, weight.scales[ids], minima, form, weight.table).to(dtype)


def _is_paired(form: Format) -> bool:
    return form.bits in PAIRED_BITS


FP16_SCALE = tl.constexpr(256.0)
"""A number of float8_e4m3fn, divided by the one of float16 whose bits begin alike: exponents have 7 and 15 as zero."""


@triton.jit
def dot_codes(
    sums,
    x_at,
    live,
    codes,
    scales,
    minima,
    table,
    row,
    first,
    DEPTH: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    PAIRED: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Adds to sums [ROWS, COLUMNS] the products of the columns from `first` on, TILE_DEPTH of them at most.

    x_at [ROWS, 1] are rows of x, of which `live` [ROWS, 1] are read. codes, scales and minima begin a matrix of DEPTH columns, of
    which `row` [COLUMNS] are the rows. KIND is whole (code - ZERO), table (table[code]) or floats (float8_e4m3fn). GROUP columns
    share a scale; it divides TILE_DEPTH, or is a multiple.
    """
    LENGTH: tl.constexpr = TILE_DEPTH // 2 if PAIRED else TILE_DEPTH
    at = tl.arange(0, LENGTH)
    if PAIRED:
        column = first + at // (UNIT // 2) * UNIT + at % (UNIT // 2)
        codes_at = codes + (row.to(tl.int64) * (DEPTH // 2))[None, :] + (first // 2 + at)[:, None]
    else:
        column = first + at
        codes_at = codes + (row.to(tl.int64) * DEPTH)[None, :] + column[:, None]
    group_at = (row.to(tl.int64) * (DEPTH // GROUP))[None, :]
    scale = _of_columns(scales + group_at, first, DEPTH, TILE_DEPTH, GROUP, LENGTH)
    minimum = scale
    if minima is not None:
        minimum = _of_columns(minima + group_at, first, DEPTH, TILE_DEPTH, GROUP, LENGTH)
    if DEPTH % TILE_DEPTH == 0:
        inside = live
        code = tl.load(codes_at)
    else:
        inside = live & (column < DEPTH)[None, :]
        code = tl.load(codes_at, mask=(column < DEPTH)[:, None], other=0)
    left = tl.load(x_at + column[None, :], mask=inside, other=0.0)
    low = code & 15 if PAIRED else code
    right = _numbers(low, scale, minimum, table, minima is not None, KIND, ZERO).to(left.dtype)
    sums = tl.dot(left, right, sums, input_precision="ieee")
    if PAIRED:
        left = tl.load(x_at + (column + UNIT // 2)[None, :], mask=inside, other=0.0)
        right = _numbers(code >> 4, scale, minimum, table, minima is not None, KIND, ZERO).to(left.dtype)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def _of_columns(at, first, DEPTH: tl.constexpr, TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr, LENGTH: tl.constexpr):
    """Loads the numbers of groups at [1, COLUMNS] for each of the tile's columns, fp32: [LENGTH, COLUMNS], or [1, COLUMNS]."""
    if GROUP >= TILE_DEPTH:
        found = tl.load(at + first // GROUP).to(tl.float32)
    else:  # what follows a return is compiled all the same
        GROUPS_HERE: tl.constexpr = TILE_DEPTH // GROUP
        group = tl.arange(0, GROUPS_HERE)
        if DEPTH % TILE_DEPTH == 0:
            each = tl.load(at + (first // GROUP + group)[:, None])
        else:
            each = tl.load(at + (first // GROUP + group)[:, None], mask=(first + group * GROUP < DEPTH)[:, None], other=0.0)
        COLUMNS: tl.constexpr = each.shape[1]
        spread = tl.broadcast_to(each.to(tl.float32)[:, None, :], [GROUPS_HERE, LENGTH // GROUPS_HERE, COLUMNS])
        found = tl.reshape(spread, [LENGTH, COLUMNS])
    return found


@triton.jit
def _numbers(code, scale, minimum, table, MINIMA: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr):
    """Returns what codes [LENGTH, COLUMNS] uint8 stand for, fp32."""
    if KIND == "floats":
        # Its bits are those of a number in fp16 whose exponent is smaller by 8. That is exact, also where it is subnormal.
        wide = code.to(tl.uint16)
        value = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * FP16_SCALE
    elif KIND == "table":
        value = tl.load(table + code.to(tl.int32))
    else:
        value = code.to(tl.float32) - ZERO
    value = value * scale
    return value + minimum if MINIMA else value
