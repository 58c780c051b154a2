"""Merges attention over parts of the keys: split contexts (Flash-Decoding) and the two passes of cascade attention.

Each part has the result of its own softmax, and the logarithm of that softmax's denominator (LSE), which is its weight
(arXiv 2501.01005, section 2.2).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)

FEW, MANY = 8, 64
"""Segments that a program merges at once: with two kernels for all numbers of segments, no step meets another one."""


@dataclass(frozen=True)
class Partial:
    """Partial results: out [T, H, segments, D], and lse [T, H, segments] to the base 2, both fp32. Without keys an lse is -inf.

    With `room`, T is that for each sequence, and only those of at most so many tokens have results: a prompt beside them has none.
    """

    out: Tensor
    lse: Tensor
    room: int = 0

    @staticmethod
    def empty(q: Tensor, segments: int, *, sequences: int = 0, room: int = 0) -> "Partial":
        """Allocates the results of q [T, H, D], or of so many sequences with `room` for each."""
        heads, dim = q.shape[1:]
        lse = torch.empty(sequences * room or len(q), heads, segments, dtype=torch.float32, device=q.device)
        return Partial(lse.new_empty(*lse.shape, dim), lse, room)

    @property
    def segments(self) -> int:
        return self.lse.shape[2]


@triton.jit(do_not_specialize=["count", "room"])
def _merge(
    partial_out, partial_lse, sinks, query_start, out, count, room, AT_ONCE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Program (token, head), of `count` segments, AT_ONCE at a time.

    With `query_start`, (token of a sequence that has `room` for them, head).
    """
    token = tl.program_id(0)
    row = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    if query_start is not None:
        sequence = token // room
        begin = tl.load(query_start + sequence)
        queries = tl.load(query_start + sequence + 1) - begin
        own = token % room
        if (own >= queries) | (queries > room):
            return
        token = begin + own
    to = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    one = tl.zeros([1], tl.int64)
    head = tl.program_id(1) + one
    merged = merged_rows(partial_out, partial_lse, sinks, row + one, head, one == 0, count, count, AT_ONCE, HEAD_DIM, PADDED_DIM)
    tl.store(out + to * HEAD_DIM + dims[None, :], merged.to(out.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])


@triton.jit
def merged_rows(
    partial_out, partial_lse, sinks, row, head, real, used, count, AT_ONCE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Returns [ROWS, PADDED_DIM] fp32: the first `used` of `count` segments of rows [ROWS], which are `real`, AT_ONCE at a time."""
    dims = tl.arange(0, PADDED_DIM)
    top = tl.full([row.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([row.shape[0]], tl.float32)
    merged = tl.zeros([row.shape[0], PADDED_DIM], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, mask=real, other=0.0) * LOG2_E
        total += 1
    for first in range(0, used, AT_ONCE):
        segment = first + tl.arange(0, AT_ONCE)
        place = row[:, None] * count + segment[None, :]
        lse = tl.load(partial_lse + place, mask=real[:, None] & (segment < used)[None, :], other=float("-inf"))
        # A segment without keys was never written, and is not read.
        some = lse > float("-inf")
        new_top = tl.maximum(top, tl.max(lse, 1))
        base = tl.where(new_top > float("-inf"), new_top, 0.0)
        weight, shrink = tl.exp2(lse - base[:, None]), tl.exp2(top - base)
        pointers = partial_out + place[:, :, None] * HEAD_DIM + dims[None, None, :]
        parts = tl.load(pointers, mask=some[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0)
        merged = merged * shrink[:, None] + tl.sum(parts * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
    return merged / tl.where(total > 0, total, 1.0)[:, None]


def merge(partial: Partial, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    """Returns the attention [T, H, D] over all segments, and over the `sinks` [H] of `AttentionWeights`."""
    tokens, heads, _, dim = partial.out.shape
    out = partial.out.new_empty(tokens, heads, dim, dtype=dtype)
    _launch(partial, out, sinks)
    return out


def merge_short(partial: Partial, query_start: Tensor, out: Tensor, sinks: Tensor | None) -> None:
    """Writes the attention of sequences that `partial` has room for to their tokens of out [T, H, D], and to no others.

    `sinks` as for `merge`.
    """
    assert partial.room
    _launch(partial, out, sinks, query_start)


def _launch(partial: Partial, out: Tensor, sinks: Tensor | None, query_start: Tensor | None = None) -> None:
    places, heads, segments, dim = partial.out.shape
    _merge[places, heads](
        partial.out,
        partial.lse,
        sinks,
        query_start,
        out,
        segments,
        partial.room,
        AT_ONCE=FEW if segments <= FEW else MANY,
        HEAD_DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        num_warps=4,
    )
