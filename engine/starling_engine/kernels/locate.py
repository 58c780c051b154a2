"""Positions of a step's tokens, and all that follows from them, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

TILE = tl.constexpr(256)


@triton.jit
def _before(row, real, slots, starts, lengths, query_start):
    """Returns the position of each row's first token, less that token's index in the step."""
    start = tl.load(starts + row, mask=real, other=0)
    length = tl.load(lengths + tl.load(slots + row, mask=real, other=0), mask=real, other=0)
    return tl.where(start < 0, length - 1, start) - tl.load(query_start + row, mask=real, other=0)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_samples", "padding"])
def _locate(
    ids, token_rows, query_start, slots, starts, feed_slots, feed_at, sampled, last, lengths, tables, table_stride, width,
    positions, targets, context_lens, ends, num_tokens, num_rows, num_samples, padding,
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (tile): rows, samples and tokens [tile * TILE, + TILE)."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)

    is_row = at < num_rows
    before = _before(at, is_row, slots, starts, lengths, query_start)
    fed = tl.load(last + tl.load(feed_slots + at, mask=is_row, other=0), mask=is_row, other=0)
    tl.store(ids + tl.load(feed_at + at, mask=is_row, other=0), fed, mask=is_row)
    behind = tl.load(query_start + 1 + at, mask=is_row, other=0)
    tl.store(context_lens + at, (before + behind).to(tl.int32), mask=is_row)

    is_sample = at < num_samples
    token = tl.load(sampled + at, mask=is_sample, other=0)
    row = tl.load(token_rows + token, mask=is_sample, other=0)
    tl.store(ends + at, _before(row, is_sample, slots, starts, lengths, query_start) + token + 1, mask=is_sample)

    is_token = at < num_tokens
    row = tl.load(token_rows + at, mask=is_token, other=0)
    position = _before(row, is_token, slots, starts, lengths, query_start) + at
    tl.store(positions + at, position, mask=is_token)
    slot = tl.load(slots + row, mask=is_token, other=0)
    for group in range(GROUPS):
        entry = tables + group * table_stride + slot * width + position // BLOCK_SIZE
        block = tl.load(entry, mask=is_token, other=0).to(tl.int64)
        target = tl.where(slot == padding, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(targets + group * num_tokens.to(tl.int64) + at, target, mask=is_token)


def locate(
    *,
    ids: Tensor,
    token_rows: Tensor,
    query_start: Tensor,
    slots: Tensor,
    starts: Tensor,
    feed_slots: Tensor,
    feed_at: Tensor,
    sampled: Tensor,
    last: Tensor,
    lengths: Tensor,
    tables: Tensor,
    positions: Tensor,
    targets: Tensor,
    context_lens: Tensor,
    ends: Tensor,
    block_size: int,
) -> None:
    """Does what `worker.device.device_positions` does in torch; arguments have the names and shapes that they have there.

    `tables` [G, slots + 1, width] int32; its last slot is padding's.
    """
    groups, num_slots, width = tables.shape
    num_tokens, num_rows, num_samples = len(positions), len(slots), len(ends)
    assert all(tensor.is_contiguous() for tensor in (tables, targets, last, lengths)) and targets.shape == (groups, num_tokens)
    _locate[(triton.cdiv(max(num_tokens, num_rows, num_samples), TILE.value),)](
        ids,
        token_rows,
        query_start,
        slots,
        starts,
        feed_slots,
        feed_at,
        sampled,
        last,
        lengths,
        tables,
        num_slots * width,
        width,
        positions,
        targets,
        context_lens,
        ends,
        num_tokens,
        num_rows,
        num_samples,
        num_slots - 1,
        GROUPS=groups,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )
