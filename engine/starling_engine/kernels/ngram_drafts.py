"""Drafts by prompt lookup: a program for each row reads the row's sequence, from its end on, until a place is as long as can be."""

import triton
import triton.language as tl
from torch import Tensor

TILE = tl.constexpr(2048)
WARPS = 8


@triton.jit
def _ngram_drafts(
    ids, query_start, slots, starts, lengths, tokens, stride,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0)
    first, behind = tl.load(query_start + row), tl.load(query_start + row + 1)
    back = tl.arange(0, LANES)
    at = behind - 1 - back
    own = tl.load(ids + at, mask=at > first, other=0) < 0
    count = tl.sum(own.to(tl.int32), 0)
    if count > 0:
        slot, start = tl.load(slots + row), tl.load(starts + row)
        start = tl.where(start < 0, tl.load(lengths + slot) - 1, start)
        length = start.to(tl.int32) + behind - first - count
        text = tokens + slot * stride
        best, end = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        top = length - 1
        while (top >= SHORTEST) & (best < LONGEST):
            place = top - tl.arange(0, TILE)
            alike, matched = place >= SHORTEST, tl.zeros([TILE], tl.int32)
            for n in range(LONGEST):
                last = tl.load(text + length - 1 - n, mask=n < length, other=0)
                alike = alike & (place > n)
                alike = alike & (tl.load(text + place - 1 - n, mask=alike, other=-1) == last)
                matched += alike.to(tl.int32)
            most = tl.max(matched, 0)
            if (most > best) & (most >= SHORTEST):  # of places as long, the latest was seen first
                best = most
                end = tl.max(tl.where(matched == most, place, 0), 0)
            top -= TILE
        if best > 0:
            token = tl.load(text + end + (count - 1 - back) % (length - end), mask=own)
            tl.store(ids + at, token.to(tl.int64), mask=own)


def ngram_drafts(
    ids: Tensor,
    query_start: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    *,
    shortest: int,
    longest: int,
    most: int,
) -> None:
    """Does what `kernels.prompt_lookup.ngram_drafts` does. Reads 4 bytes for each token of a row's sequence."""
    assert ids.dtype == slots.dtype == starts.dtype == lengths.dtype and tokens.stride(1) == 1
    _ngram_drafts[(len(slots),)](
        ids,
        query_start,
        slots,
        starts,
        lengths,
        tokens,
        tokens.stride(0),
        SHORTEST=shortest,
        LONGEST=longest,
        LANES=triton.next_power_of_2(most),
        num_warps=WARPS,
    )
