"""The kernel of attention over the paged cache: one for prefill, decode and steps that mix both. `paged_attention` launches it.

A program takes one query block: tokens of a sequence times the query heads of one key-value head. It walks over the keys that the
block sees, with the softmax of FlashAttention-2 (arXiv 2307.08691), in powers of two.
"""

import triton
import triton.language as tl

from starling_engine.kernels.coded_rows import load_coded, load_tile
from starling_engine.kernels.overlap import begin_after
from starling_engine.kernels.split_attention import LOG2_E, merged_rows
from starling_engine.kernels.store import cached_row, store_whole, turned


@triton.jit
def _sequence_of(query_block, query_start, sequences, BLOCK_Q: tl.constexpr):
    """Returns the sequence of a query block: those of sequence s begin at query_start[s] // BLOCK_Q + s."""
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _rows_of(cache, at, dims, here, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads [KEYS, PADDED_DIM] of the cache; 0 past the head, and past the keys that are `here`: their blocks may hold anything."""
    if cache.dtype.element_ty.is_int():
        found = load_coded(cache + at, here, HEAD_DIM, dims.shape[0], MASKED)
    else:
        found = load_tile(cache + at[:, None] + dims[None, :], here, dims < HEAD_DIM, MASKED, dims.shape[0] != HEAD_DIM)
    return found


@triton.jit
def _attend(
    acc, total, top, q, keys, values, table, stride_block, row_at, seen_from, seen_to, first, last, scale, soft_cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROW_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the tiles `first` to `last` of the keys to (acc, total, top). `top` is the largest score so far, as a power of two.

    Without MASKED every row sees every key of these tiles.
    """
    dims = tl.arange(0, q.shape[1])
    factor = LOG2_E if CAPPED else scale * LOG2_E
    for tile in range(first, last):
        key_at = tile * KEYS + tl.arange(0, KEYS)
        here = (key_at >= seen_from) & (key_at < seen_to)
        if MASKED:
            block = tl.load(table + key_at // BLOCK_SIZE, mask=here, other=0)
        else:
            block = tl.load(table + key_at // BLOCK_SIZE)
        at = block.to(tl.int64) * stride_block + (key_at % BLOCK_SIZE) * ROW_SIZE
        k = _rows_of(keys, at, dims, here, HEAD_DIM, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            # cap * tanh(x / cap), with a tanh that stays finite where its exponential does not.
            scores = soft_cap - 2 * soft_cap / (1 + tl.exp2(scores * (2 * LOG2_E * scale / soft_cap)))
        if MASKED:
            seen = here[None, :]
            if CAUSAL:
                seen = seen & (key_at[None, :] <= row_at[:, None])
            if WINDOW > 0:
                seen = seen & (key_at[None, :] > row_at[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
        if MASKED:
            # For a row that has seen nothing yet: -inf must not be subtracted from -inf.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = _rows_of(values, at, dims, here, HEAD_DIM, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(
    do_not_specialize=["sequences", "blocks", "shortest", "longest", "prefix", "suffix", "segment_base", "all_segments", "room"],
    do_not_specialize_on_alignment=["slot_mapping"],
)
def attention_kernel(
    q, kv, block_tables, query_start, context_lens, query_blocks, sinks, out, partial_out, partial_lse, arrived, positions,
    slot_mapping, cos_sin, q_norm, k_norm, eps, sequences, blocks, shortest, longest, prefix, suffix, segment_base, all_segments,
    room, scale, key_scale, value_scale, soft_cap, stride_q_token, stride_block, stride_value, stride_head, stride_table,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROW_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PARTIAL: tl.constexpr, SHORT: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    STORES: tl.constexpr, MERGED: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (query block, key-value head, segment). See `paged_attention`.

    PREFIX: all tokens attend to the first `prefix` keys of sequence 0's table, none hidden. Else sequences with `shortest` to
    `longest` queries attend to their keys from `suffix` on. SHORT: each sequence has room for `blocks` query blocks. Or
    `query_blocks` lists them, as `AttentionMetadata` has them, with a sequence of -1 where there is none.
    PARTIAL: keys are split over the segments, of which there may be one. Writes results of `all_segments`, at `segment_base` plus
    the segment. Their number is no constant, so that one kernel serves all of them. `room`: as in `Partial`. `sinks` come in where
    they are merged. With `arrived` [query blocks, key-value heads] the last program of a query block merges its segments to `out`.
    It has room for MERGED heads, takes AT_ONCE segments at a time, and leaves each number 0, as it was. Segments past the last key
    do not count.
    `positions`: sequences have one token at most, and q has rows of queries, keys and values that are neither normalised nor
    rotated. A program does that for its queries; the one that reads the token's key stores it with its value, if the layer STORES.
    HALF: half of the elements that rotate. OVERLAPS: as for `begin_after`.
    ROW_SIZE: elements of a cached row, known when this is compiled. A row of codes is no multiple of 16 bytes, and yet is read in
    more than one.
    """
    begin_after(OVERLAPS)
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    # The last blocks of a sequence see the most keys, so they go first.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if PREFIX:
        sequence = 0
        begin = 0
        queries = tl.load(query_start + sequences)
        context = prefix
        token = query_block * BLOCK_Q
    else:
        if SHORT:
            sequence = query_block // blocks
        elif query_blocks is not None:
            sequence = tl.load(query_blocks + 2 * query_block)
            if sequence < 0:
                return
        else:
            sequence = _sequence_of(query_block, query_start, sequences, BLOCK_Q)
        begin = tl.load(query_start + sequence)
        queries = tl.load(query_start + sequence + 1) - begin
        context = tl.load(context_lens + sequence)
        if SHORT:
            token = query_block % blocks * BLOCK_Q
        elif query_blocks is not None:
            token = tl.load(query_blocks + 2 * query_block + 1) * BLOCK_Q
        else:
            token = (query_block - begin // BLOCK_Q - sequence) * BLOCK_Q
        if query_blocks is None or SHORT:  # noqa: SIM102 - known when it is compiled
            if (queries < shortest) | (queries > longest):
                return
    if token >= queries:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    own = token + rows // GROUP
    real = (own < queries) & (rows < BLOCK_Q * GROUP)
    at = begin + own
    head = kv_head * GROUP + rows % GROUP
    q_rows = q + at.to(tl.int64) * stride_q_token + head * HEAD_DIM
    whole = real[:, None] & (dims < HEAD_DIM)[None, :]
    if positions is None:
        queries_here = tl.load(q_rows[:, None] + dims[None, :], mask=whole, other=0.0)
    else:
        turns_at = cos_sin + tl.load(positions + begin).to(tl.int64) * (2 * HALF)
        _, rotated = turned(q_rows, turns_at, q_norm, real, eps, HEAD_DIM, PADDED_DIM, HALF)
        queries_here = rotated.to(q.dtype.element_ty)

    # The keys that some row sees, from seen_from to seen_to; all rows see those from all_from to all_to.
    if PREFIX:
        row_at = own
        seen_from = 0
        seen_to = context
        all_from = 0
        all_to = context
    else:
        row_at = context - queries + own
        first_at = context - queries + token
        last_at = context - queries + tl.minimum(token + BLOCK_Q, queries) - 1
        seen_from = suffix
        all_from = suffix
        if WINDOW > 0:
            seen_from = tl.maximum(first_at - WINDOW + 1, 0)
            all_from = tl.maximum(last_at - WINDOW + 1, 0)
        seen_to = last_at + 1
        all_to = first_at + 1

    first = seen_from // KEYS
    last = tl.maximum(tl.cdiv(seen_to, KEYS), first)
    if PARTIAL:
        share = tl.cdiv(last - first, tl.num_programs(2))
        used = tl.maximum(tl.cdiv(last - first, tl.maximum(share, 1)), 1)
        if arrived is not None:  # noqa: SIM102 - known when it is compiled
            if tl.program_id(2) >= used:
                return
        first = first + tl.program_id(2) * share
        last = tl.minimum(first + share, last)
    if positions is not None and STORES:
        newest = (seen_to - 1) // KEYS
        if (newest >= first) & (newest < last):
            part = tl.arange(0, 2)
            is_value = part == 1
            slot = tl.load(slot_mapping + begin).to(tl.int64) + part * 0
            news = q + tl.cast(begin, tl.int64) * stride_q_token + (HEADS + kv_head + part * (HEADS // GROUP)) * HEAD_DIM
            places = cached_row(kv, slot, kv_head, is_value, stride_block, stride_value, stride_head, ROW_SIZE, BLOCK_SIZE)
            inverse_scale = 1.0 / tl.where(is_value, value_scale, key_scale)
            store_whole(
                news, turns_at, k_norm, part >= 0, is_value, places, slot >= 0, eps, inverse_scale, HEAD_DIM, PADDED_DIM, HALF
            )  # fmt: skip
            # Other threads of this block read what was stored here.
            tl.debug_barrier()
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    keys = kv + kv_head.to(tl.int64) * stride_head
    values = keys + stride_value
    table = block_tables + tl.cast(sequence, tl.int64) * stride_table
    if SHORT:
        # Bound by memory, with one or two tiles of keys to mask: a second loop would only wait for its first loads.
        acc, total, top = _attend(
            acc, total, top, queries_here, keys, values, table, stride_block, row_at, seen_from, seen_to, first,
            last, scale, soft_cap, WINDOW, CAPPED, not PREFIX, True, KEYS, BLOCK_SIZE, HEAD_DIM, ROW_SIZE, PRECISION,
        )  # fmt: skip
    else:
        all_first = tl.minimum(tl.maximum(tl.cdiv(all_from, KEYS), first), last)
        all_last = tl.minimum(tl.maximum(all_to // KEYS, all_first), last)
        if not PREFIX:
            acc, total, top = _attend(
                acc, total, top, queries_here, keys, values, table, stride_block, row_at, seen_from, seen_to, first,
                all_first, scale, soft_cap, WINDOW, CAPPED, not PREFIX, True, KEYS, BLOCK_SIZE, HEAD_DIM, ROW_SIZE, PRECISION,
            )  # fmt: skip
        acc, total, top = _attend(
            acc, total, top, queries_here, keys, values, table, stride_block, row_at, seen_from, seen_to, all_first,
            all_last, scale, soft_cap, WINDOW, CAPPED, not PREFIX, False, KEYS, BLOCK_SIZE, HEAD_DIM, ROW_SIZE, PRECISION,
        )  # fmt: skip
        acc, total, top = _attend(
            acc, total, top, queries_here, keys, values, table, stride_block, row_at, seen_from, seen_to, all_last,
            last, scale, soft_cap, WINDOW, CAPPED, not PREFIX, True, KEYS, BLOCK_SIZE, HEAD_DIM, ROW_SIZE, PRECISION,
        )  # fmt: skip

    if not PARTIAL and sinks is not None:
        # One score more, whose value is 0.
        sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2_E
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - new_top)
    # A row that sees no key, as padding may, is 0.
    acc = acc * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    if PARTIAL:
        token_place = tl.where(room > 0, sequence * room, begin) + own
        place = (token_place.to(tl.int64) * HEADS + head) * all_segments + segment_base + tl.program_id(2)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + place, lse, mask=real)
        tl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=whole)
        if arrived is not None:
            # One thread counts for all that this block has written, and sees for all what others have.
            tl.debug_barrier()
            counter = arrived + tl.program_id(0) * tl.num_programs(1) + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1:
                tl.store(counter, 0)
                each = tl.arange(0, MERGED)
                mine = each < GROUP
                row = tl.cast(begin, tl.int64) * HEADS + kv_head * GROUP + each
                merged = merged_rows(
                    partial_out, partial_lse, sinks, row, kv_head * GROUP + each, mine, used, all_segments, AT_ONCE, HEAD_DIM,
                    PADDED_DIM,
                )  # fmt: skip
                to = out + row[:, None] * HEAD_DIM + dims[None, :]
                tl.store(to, merged.to(out.dtype.element_ty), mask=mine[:, None] & (dims < HEAD_DIM)[None, :])
    else:
        place = at.to(tl.int64) * HEADS + head
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=whole)
