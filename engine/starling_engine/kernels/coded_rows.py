"""Rows of a cache in int8 or int4, as `native/cache_rows.py` has them: made of numbers, and read as numbers; for other kernels.

A row's codes, scales and minima have addresses of their own. Where they are loaded, each scale is spread over its 32 columns.
"""

import triton
import triton.language as tl

from starling_engine.config import CACHE_GROUP
from starling_engine.native.cache_rows import LARGEST

GROUP = tl.constexpr(CACHE_GROUP)
HALF_GROUP = tl.constexpr(CACHE_GROUP // 2)
MOST = tl.constexpr(LARGEST)
TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""Added to a small number of fp32 and taken away, it leaves the nearest whole one; of two as near, the even one, as torch does."""


@triton.jit
def load_coded(rows, here, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads rows, pointers [ROWS] to int8 or uint8, as numbers [ROWS, PADDED_DIM] fp32.

    They are 0 past the head, and with MASKED where no row is `here`.
    """
    at = tl.arange(0, PADDED_DIM)
    group = tl.arange(0, PADDED_DIM // GROUP)
    inside = group < HEAD_DIM // GROUP
    if rows.dtype.element_ty == tl.int8:
        codes = load_tile(rows[:, None] + at[None, :], here, at < HEAD_DIM, MASKED, PADDED_DIM != HEAD_DIM)
        sides = rows + HEAD_DIM
    else:
        # Each byte is read for both of its columns, by neighbours, so that it comes once.
        paired = (at // GROUP) * HALF_GROUP + at % HALF_GROUP
        codes = load_tile(rows[:, None] + paired[None, :], here, at < HEAD_DIM, MASKED, PADDED_DIM != HEAD_DIM)
        codes = (codes >> (at % GROUP // HALF_GROUP * 4).to(tl.uint8)[None, :]) & 15
        sides = rows + HEAD_DIM // 2
    numbers = tl.reshape(codes.to(tl.float32), [rows.shape[0], PADDED_DIM // GROUP, GROUP])
    scales = sides.to(tl.pointer_type(tl.float16))[:, None] + group[None, :]
    numbers *= load_tile(scales, here, inside, MASKED, PADDED_DIM != HEAD_DIM).to(tl.float32)[:, :, None]
    if rows.dtype.element_ty == tl.uint8:
        minima = scales + HEAD_DIM // GROUP
        numbers += load_tile(minima, here, inside, MASKED, PADDED_DIM != HEAD_DIM).to(tl.float32)[:, :, None]
    return tl.reshape(numbers, [rows.shape[0], PADDED_DIM])


@triton.jit
def load_tile(pointers, here, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads [ROWS, COLUMNS]: with MASKED 0 where no row is `here`, and with PADDED, too, where no column is `inside`."""
    if MASKED:
        return tl.load(pointers, mask=here[:, None] & inside[None, :], other=0.0)
    if PADDED:
        return tl.load(pointers, mask=inside[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_coded(x, rows, kept, HEAD_DIM: tl.constexpr):
    """Stores x [ROWS, PADDED_DIM] fp32, of which HEAD_DIM columns count, in the rows at pointers [ROWS] that are `kept`."""
    GROUPS: tl.constexpr = x.shape[1] // GROUP
    group = tl.arange(0, GROUPS)
    numbers = tl.reshape(x, [x.shape[0], GROUPS, GROUP])
    # NaN where a group has what is not a number: its scale says so when it is read.
    broken = tl.sum(numbers - numbers, 2)
    kept = kept[:, None] & (group < HEAD_DIM // GROUP)[None, :]
    if rows.dtype.element_ty == tl.int8:
        scale = _half(tl.div_rn(tl.max(tl.abs(numbers), 2), 127.0) + broken)
        codes = _codes(numbers, scale, -127.0, 127.0)
        sides = rows + HEAD_DIM
    else:
        least = _half(tl.min(numbers, 2))
        scale = _half(tl.div_rn(tl.max(numbers, 2) - least.to(tl.float32), 15.0) + broken)
        halves = tl.reshape(
            _codes(numbers - least.to(tl.float32)[:, :, None], scale, 0.0, 15.0), [x.shape[0], GROUPS, 2, HALF_GROUP]
        )
        codes = tl.sum(halves << (tl.arange(0, 2) * 4)[None, None, :, None], 2)
        sides = rows + HEAD_DIM // 2
    BYTES: tl.constexpr = codes.shape[2]
    at = (group * BYTES)[:, None] + tl.arange(0, BYTES)[None, :]
    tl.store(rows[:, None, None] + at[None, :, :], codes.to(rows.dtype.element_ty), mask=kept[:, :, None])
    scales = sides.to(tl.pointer_type(tl.float16))[:, None] + group[None, :]
    tl.store(scales, scale, mask=kept)
    if rows.dtype.element_ty == tl.uint8:
        tl.store(scales + HEAD_DIM // GROUP, least, mask=kept)


@triton.jit
def _codes(numbers, scale, low, high):
    """Returns the codes [ROWS, GROUPS, GROUP] int32 of numbers from 0 on: what is beyond the last code becomes that."""
    wide = scale.to(tl.float32)
    inverse = tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)
    held = tl.minimum(tl.maximum(numbers * inverse[:, :, None], low), high)
    return (tl.where(held == held, held + TO_WHOLE, TO_WHOLE) - TO_WHOLE).to(tl.int32)


@triton.jit
def _half(x):
    """Rounds to float16, to its largest what is beyond; NaN stays."""
    x = tl.maximum(x, -MOST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, MOST, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
