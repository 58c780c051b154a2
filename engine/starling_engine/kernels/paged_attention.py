"""Attention over the paged cache: one kernel for prefill, decode and steps that mix both.

A program takes one query block (tokens of a sequence times the query heads of one key-value head) and walks over the keys that it
sees, with the softmax of FlashAttention-2 (arXiv 2307.08691), in powers of two. `attention_plan` says how large its tiles are.
Where a grid of query blocks is too small, or a prefix is attended to apart, programs write partial results that
`split_attention` merges.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.attention_plan import Shape, Tiles, decode_segments, decode_tiles, prefill_tiles
from starling_engine.kernels.split_attention import Partial, merge

LOG2_E = tl.constexpr(1.4426950408889634)
NO_LIMIT = 1 << 30
MAX_GROUP = 32
SMS_OF_H200 = 132


@triton.jit
def _sequence_of(query_block, query_start, sequences, BLOCK_Q: tl.constexpr):
    """The last sequence whose query blocks begin at or before this one; those of s begin at query_start[s] // BLOCK_Q + s."""
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
def _rows_of(pages, at, dims, here, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """[KEYS, PADDED_DIM] of the cache; 0 past the head, and past the keys that are `here`, since their pages may hold anything."""
    pointers = pages + at[:, None] + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=here[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if dims.shape[0] != HEAD_DIM:
        return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend(
    acc, total, top, q, keys, values, table, stride_block, stride_offset, row_at, seen_from, seen_to, first, last, scale, soft_cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the tiles `first` to `last` of the keys into (acc, total, top). `top` is the largest score so far, as a power of two.

    Without MASKED every row sees every key of them.
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
        at = block.to(tl.int64) * stride_block + (key_at % BLOCK_SIZE) * stride_offset
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
            # A row that has seen nothing yet: what is subtracted must not be -inf.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = _rows_of(values, at, dims, here, HEAD_DIM, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["sequences", "shortest", "longest", "prefix", "suffix", "segment_base"])
def _paged_attention(
    q, kv, block_tables, query_start, context_lens, out, partial_out, partial_lse, sequences, shortest, longest, prefix, suffix,
    segment_base, scale, value_scale, soft_cap, stride_q_token, stride_block, stride_value, stride_head, stride_offset,
    stride_table,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SEGMENTS: tl.constexpr,
    ALL_SEGMENTS: tl.constexpr, ONE_BLOCK: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (query block, key-value head, segment). See `paged_attention`.

    PREFIX: all tokens attend to the first `prefix` keys of sequence 0's table, none hidden. Else sequences whose queries count
    from `shortest` to `longest` attend to their keys from `suffix` on. ONE_BLOCK: each sequence has one query block at most.
    ALL_SEGMENTS > 0: partial results, at `segment_base` plus the segment.
    """
    BLOCK_Q: tl.constexpr = ROWS // GROUP
    # Of a sequence the last blocks see the most keys: they go first.
    query_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if PREFIX:
        sequence = 0
        begin = 0
        queries = tl.load(query_start + sequences)
        context = prefix
        token = query_block * BLOCK_Q
    else:
        if ONE_BLOCK:
            sequence = query_block
        else:
            sequence = _sequence_of(query_block, query_start, sequences, BLOCK_Q)
        begin = tl.load(query_start + sequence)
        queries = tl.load(query_start + sequence + 1) - begin
        context = tl.load(context_lens + sequence)
        token = 0 if ONE_BLOCK else (query_block - begin // BLOCK_Q - sequence) * BLOCK_Q
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
    q_pointers = q + at.to(tl.int64)[:, None] * stride_q_token + head[:, None] * HEAD_DIM + dims[None, :]
    whole = real[:, None] & (dims < HEAD_DIM)[None, :]
    queries_here = tl.load(q_pointers, mask=whole, other=0.0)

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
    if SEGMENTS > 1:
        share = tl.cdiv(last - first, SEGMENTS)
        first = first + tl.program_id(2) * share
        last = tl.minimum(first + share, last)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    keys = kv + kv_head.to(tl.int64) * stride_head
    values = keys + stride_value
    table = block_tables + tl.cast(sequence, tl.int64) * stride_table
    if ONE_BLOCK:
        # Bound by memory, with one tile of keys to mask: a second loop would only wait for its first loads.
        acc, total, top = _attend(
            acc, total, top, queries_here, keys, values, table, stride_block, stride_offset, row_at, seen_from, seen_to, first,
            last, scale, soft_cap, WINDOW, CAPPED, not PREFIX, True, KEYS, BLOCK_SIZE, HEAD_DIM, PRECISION,
        )  # fmt: skip
    else:
        all_first = tl.minimum(tl.maximum(tl.cdiv(all_from, KEYS), first), last)
        all_last = tl.minimum(tl.maximum(all_to // KEYS, all_first), last)
        if not PREFIX:
            acc, total, top = _attend(
                acc, total, top, queries_here, keys, values, table, stride_block, stride_offset, row_at, seen_from, seen_to, first,
                all_first, scale, soft_cap, WINDOW, CAPPED, not PREFIX, True, KEYS, BLOCK_SIZE, HEAD_DIM, PRECISION,
            )  # fmt: skip
        acc, total, top = _attend(
            acc, total, top, queries_here, keys, values, table, stride_block, stride_offset, row_at, seen_from, seen_to, all_first,
            all_last, scale, soft_cap, WINDOW, CAPPED, not PREFIX, False, KEYS, BLOCK_SIZE, HEAD_DIM, PRECISION,
        )  # fmt: skip
        acc, total, top = _attend(
            acc, total, top, queries_here, keys, values, table, stride_block, stride_offset, row_at, seen_from, seen_to, all_last,
            last, scale, soft_cap, WINDOW, CAPPED, not PREFIX, True, KEYS, BLOCK_SIZE, HEAD_DIM, PRECISION,
        )  # fmt: skip

    # A row that sees no key, as padding may be, is 0.
    acc = acc * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    place = at.to(tl.int64) * HEADS + head
    if ALL_SEGMENTS > 0:
        place = place * ALL_SEGMENTS + segment_base + tl.program_id(2)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + place, lse, mask=real)
        tl.store(partial_out + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=whole)
    else:
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=whole)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What every launch for one layer and step has in common; for the fields see `paged_attention`."""

    q: Tensor
    kv: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        heads, dim = self.q.shape[1:]
        if self.group > MAX_GROUP:
            raise ValueError(f"{self.group} query heads share a key-value head; Triton's kernels take {MAX_GROUP} at most")
        assert self.scale > 0 and heads % self.kv.shape[2] == 0 and dim == self.kv.shape[4]
        assert self.q.stride()[1:] == (dim, 1) and self.kv.stride(4) == 1 and self.block_tables.stride(1) == 1

    @property
    def sequences(self) -> int:
        return len(self.context_lens)

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.q.shape[1] // self.kv.shape[2]

    @property
    def shape(self) -> Shape:
        tokens, heads, dim = self.q.shape
        return Shape(
            tokens=tokens,
            sequences=self.sequences,
            heads=heads,
            kv_heads=self.kv.shape[2],
            head_dim=dim,
            itemsize=self.q.itemsize,
        )

    @property
    def longest(self) -> int:
        """Keys that a query may see, as far as the host knows."""
        room = self.block_tables.shape[1] * self.kv.shape[3]
        return min(room, self.window) if self.window else room


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which queries and keys a launch is for; all of them unless said otherwise.

    Sequences whose queries count from `shortest` to `longest`, and their keys from `suffix` on; or, with `prefix`, all tokens and
    the first `prefix` keys of the first sequence. `one_block`: each of these sequences fits in one query block.
    """

    one_block: bool = False
    shortest: int = 1
    longest: int = NO_LIMIT
    prefix: int = 0
    suffix: int = 0


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    *,
    max_query_len: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Causal attention of q [T, H, D] over kv [num_blocks, 2, KVH, block_size, D] -> [T, H, D] of q's dtype, summed in fp32.

    block_tables [S, max_blocks], query_start [S + 1] and context_lens [S] int32, as in `AttentionMetadata`; scale > 0. kv may be of
    float8_e4m3fn: its keys and values are worth that times key_scale and value_scale. What is launched depends on shapes and on
    max_query_len (at most T, where it is not known) alone. Tokens that no sequence owns are left as they come.
    """
    call = Call(
        q=q,
        kv=kv,
        block_tables=block_tables,
        query_start=query_start,
        context_lens=context_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return attend(call, len(q) if max_query_len is None else max_query_len)


def attend(call: Call, max_query_len: int) -> Tensor:
    """As `paged_attention`."""
    tiles = decode_tiles(call.q.shape[2], call.q.itemsize, max_query_len * call.group)
    return _attend_mixed(call) if tiles is None else _attend_short(call, tiles)


def _attend_short(call: Call, tiles: Tiles) -> Tensor:
    """Every sequence fits in one query block; its context is split where that leaves the device idle."""
    part = Part(one_block=True)
    segments = decode_segments(call.shape, call.longest, sms(call.q.device))
    if segments == 1:
        out = torch.empty_like(call.q)
        launch(call, part, tiles, out)
        return out
    partial = Partial.empty(call.q, segments)
    launch(call, part, tiles, partial, segments)
    return merge(partial, call.q.dtype)


def _attend_mixed(call: Call) -> Tensor:
    """Long queries in tiles for prefill, and beside them, in tiles of their own, sequences that fit in one small block."""
    dim, itemsize = call.q.shape[2], call.q.itemsize
    out = torch.empty_like(call.q)
    small = decode_tiles(dim, itemsize, call.group)
    assert small is not None
    short = small.tokens(call.group) if call.sequences > 1 else 0
    launch(call, Part(shortest=short + 1), prefill_tiles(dim, itemsize), out)
    if short:
        launch(call, Part(one_block=True, longest=short), small, out)
    return out


def launch(call: Call, part: Part, tiles: Tiles, out: Tensor | Partial, segments: int = 1, segment_base: int = 0) -> None:
    """Starts the kernel. Results go to out [T, H, D], or to the segments from segment_base on of partial results."""
    tokens, heads, dim = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    block_q = tiles.tokens(call.group)
    if part.prefix:
        query_blocks = -(-tokens // block_q)
    else:
        query_blocks = call.sequences if part.one_block else tokens // block_q + call.sequences
    partial = out if isinstance(out, Partial) else None
    final = out if isinstance(out, Tensor) else None
    _paged_attention[query_blocks, kv_heads, segments](
        call.q,
        call.kv,
        call.block_tables,
        call.query_start,
        call.context_lens,
        final,
        partial and partial.out,
        partial and partial.lse,
        call.sequences,
        part.shortest,
        part.longest,
        part.prefix,
        part.suffix,
        segment_base,
        call.scale * call.key_scale,
        call.value_scale,
        call.soft_cap,
        call.q.stride(0),
        *call.kv.stride()[:4],
        call.block_tables.stride(0),
        HEADS=heads,
        GROUP=call.group,
        HEAD_DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        BLOCK_SIZE=block_size,
        WINDOW=call.window,
        CAPPED=call.soft_cap > 0,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        SEGMENTS=segments,
        ALL_SEGMENTS=partial.segments if partial else 0,
        ONE_BLOCK=part.one_block,
        PREFIX=part.prefix > 0,
        PRECISION="ieee" if call.q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )


@functools.cache
def sms(device: torch.device) -> int:
    """Streaming multiprocessors of the device; an H200's where kernels are not run on one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS_OF_H200
