"""Attention over the paged cache: launches `attention_kernel` for a step.

`attention_plan` chooses the tiles. Where there are too few query blocks, or a prefix is attended to apart, programs write partial
results that `split_attention` merges.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from starling_engine.kernels.attention_kernel import attention_kernel
from starling_engine.kernels.attention_plan import (
    MAX_GROUP,
    PROGRAMS_PER_SM,
    AttentionShape,
    AttentionTiles,
    QueryBlocks,
    decode_segments,
    decode_tiles,
    merged_at_once,
    prefill_tiles,
    prefix_segments,
)
from starling_engine.kernels.overlap import overlaps
from starling_engine.kernels.split_attention import Partial, merge, merge_short
from starling_engine.kernels.store import qk_norm_rope_store
from starling_engine.native.cache_rows import columns
from starling_engine.platforms.triton_support import sms

NO_LIMIT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class RawHeads:
    """A step's product before attention, qkv [T, (H + 2 KVH) D], and what it takes to be attention's: see `qk_norm_rope_store`."""

    qkv: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    stores: bool = True

    def queries(self, head_dim: int, kv_heads: int) -> Tensor:
        """Returns a view of the queries [T, H, D]."""
        heads = self.qkv.shape[1] // head_dim - 2 * kv_heads * self.stores
        return self.qkv[:, : heads * head_dim].view(len(self.qkv), heads, head_dim)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Arguments of all launches for one layer and step; for the fields see `paged_attention`.

    With `raw`, q is its view: sequences have one token at most, whose key and value are not in kv yet.
    `arrived` [`most_arrived`] int32: zeros, and zeros again behind each launch. With it, a split decode may be one launch.
    """

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
    sinks: Tensor | None = None
    query_blocks: Tensor | None = None
    raw: RawHeads | None = None
    arrived: Tensor | None = None

    def __post_init__(self) -> None:
        heads, dim = self.q.shape[1:]
        assert self.group <= MAX_GROUP, "another backend is selected"
        assert self.scale > 0 and heads % self.kv.shape[2] == 0 and dim == columns(self.kv)
        assert self.sinks is None or (self.sinks.shape == (heads,) and self.sinks.is_contiguous())
        assert self.q.stride()[1:] == (dim, 1) and self.block_tables.stride(1) == 1
        assert self.kv.stride()[3:] == (self.kv.shape[4], 1)

    def stored(self) -> "AttentionCall":
        """Returns the call after the launch that `raw` needs in other steps, which stores keys and values."""
        raw = self.raw
        assert raw is not None
        q = qk_norm_rope_store(
            raw.qkv,
            raw.positions,
            raw.cos_sin,
            raw.q_norm,
            raw.k_norm,
            raw.eps,
            self.kv,
            raw.slot_mapping,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            stores=raw.stores,
        )
        return replace(self, q=q, raw=None)

    @property
    def sequences(self) -> int:
        return len(self.context_lens)

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.q.shape[1] // self.kv.shape[2]

    @property
    def shape(self) -> AttentionShape:
        tokens, heads, dim = self.q.shape
        return AttentionShape(
            tokens=tokens,
            sequences=self.sequences,
            heads=heads,
            kv_heads=self.kv.shape[2],
            head_dim=dim,
            itemsize=self.q.itemsize,
            row_bytes=self.kv.shape[4] * self.kv.itemsize,
        )

    @property
    def longest(self) -> int:
        """Most keys that a query may see, by what the host knows."""
        room = self.block_tables.shape[1] * self.kv.shape[3]
        return min(room, self.window) if self.window else room


@dataclass(frozen=True, kw_only=True)
class AttentionScope:
    """Queries and keys of a launch; the default is all.

    Sequences with `shortest` to `longest` queries attend to their keys from `suffix` on. Or, with `prefix`, all tokens attend to
    the first `prefix` keys of the first sequence. `blocks`: query blocks that are enough for each of these sequences, where they
    are short; 0: their lengths decide, on the device. `listed`: the call's `query_blocks` are those of these sequences.
    """

    blocks: int = 0
    shortest: int = 1
    longest: int = NO_LIMIT
    prefix: int = 0
    suffix: int = 0
    listed: bool = False


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
    sinks: Tensor | None = None,
    query_blocks: Tensor | None = None,
) -> Tensor:
    """Attends causally from q [T, H, D] to kv [num_blocks, 2, KVH, block_size, D] -> [T, H, D] of q's dtype, summed in fp32.

    block_tables [S, max_blocks], query_start [S + 1] and context_lens [S] int32, as in `AttentionMetadata`; scale > 0. Keys and
    values of float8_e4m3fn are multiplied by key_scale and value_scale; a cache of int8 or uint8 has rows of `cache_rows` in place
    of D elements. sinks [H] as in `AttentionWeights`, query_blocks as in `AttentionMetadata`. Launches depend on shapes alone, and
    on max_query_len, whose default is T. Rows of tokens without a sequence are undefined.
    """
    call = AttentionCall(
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
        sinks=sinks,
        query_blocks=query_blocks,
    )
    return attend(call, len(q) if max_query_len is None else max_query_len)


def most_arrived(device: torch.device) -> int:
    """Returns how many query blocks of a split step there are at most, times key-value heads: see `attention_plan`."""
    return PROGRAMS_PER_SM * sms(device) // 2


def attend(call: AttentionCall, max_query_len: int) -> Tensor:
    """Does the same as `paged_attention`."""
    tiles = decode_tiles(call.q.shape[2], call.q.itemsize, call.group, max_query_len)
    return _attend_mixed(call) if tiles is None else _attend_short(call, tiles, max_query_len)


def _attend_short(call: AttentionCall, tiles: AttentionTiles, max_query_len: int) -> Tensor:
    """Attends where every sequence is short, as a decode is, with drafts or without.

    Contexts are split where the device would be idle.
    """
    part = AttentionScope(blocks=tiles.blocks(max_query_len, call.group))
    segments = decode_segments(call.shape, call.longest, sms(call.q.device))
    out = call.q.new_empty(call.q.shape)
    if segments == 1:
        launch(call, part, tiles, out)
        return out
    partial = Partial.empty(call.q, segments)
    if max_query_len == 1 and call.arrived is not None and merged_at_once(call.group, call.q.shape[2]):
        launch(call, part, tiles, out, segments, merged=partial)
        return out
    launch(call, part, tiles, partial, segments)
    return merge(partial, call.q.dtype, call.sinks)


def _attend_mixed(call: AttentionCall) -> Tensor:
    """Attends in two launches: long queries in tiles for prefill, and sequences that fit in one small block in tiles for decode.

    Their contexts are split as in a step of decodes: the second launch waits for the first, so that it has the device alone.
    """
    dim, itemsize = call.q.shape[2], call.q.itemsize
    out = torch.empty_like(call.q)
    small, blocks = decode_tiles(dim, itemsize, call.group, 1), QueryBlocks.of(dim, itemsize, call.group)
    assert small is not None
    shortest = blocks.shortest(call.sequences)
    listed = call.query_blocks is not None
    launch(call, AttentionScope(shortest=shortest, listed=listed), prefill_tiles(dim, itemsize), out)
    if shortest == 1:
        return out
    short = shortest - 1
    part = AttentionScope(blocks=1, longest=short)
    segments = decode_segments(call.shape, call.longest, sms(call.q.device))
    if segments == 1:
        launch(call, part, small, out)
        return out
    partial = Partial.empty(call.q, segments, sequences=call.sequences, room=short)
    launch(call, part, small, partial, segments)
    merge_short(partial, call.query_start, out, call.sinks)
    return out


def cascade_attention(call: AttentionCall, shared: int, max_query_len: int) -> Tensor:
    """Gives the same as `paged_attention`, where all sequences share their first `shared` keys, before all queries. No window.

    Two passes, merged by their LSE (arXiv 2501.01005, section 3.1.2): all tokens over the prefix, as one prefill with nothing
    hidden, and each sequence over its own keys. `attention_plan.cascade_pays` says when that is cheaper.
    """
    assert not call.window and 0 < shared < call.longest
    shape, cores = call.shape, sms(call.q.device)
    wide = prefill_tiles(shape.head_dim, shape.itemsize)
    narrow = decode_tiles(shape.head_dim, shape.itemsize, call.group, max_query_len)
    first = prefix_segments(shape, shared, cores)
    rest = 1 if narrow is None else decode_segments(shape, call.longest - shared, cores)
    partial = Partial.empty(call.q, first + rest)
    launch(call, AttentionScope(prefix=shared), wide, partial, first)
    blocks = 0 if narrow is None else narrow.blocks(max_query_len, call.group)
    launch(call, AttentionScope(blocks=blocks, suffix=shared), narrow or wide, partial, rest, segment_base=first)
    return merge(partial, call.q.dtype, call.sinks)


def launch(
    call: AttentionCall,
    part: AttentionScope,
    tiles: AttentionTiles,
    out: Tensor | Partial,
    segments: int = 1,
    segment_base: int = 0,
    merged: Partial | None = None,
) -> None:
    """Starts the kernel. Results go to out [T, H, D], or to segments of partial results, from segment_base on.

    With `merged`, they go there first, and from there to `out`.
    """
    tokens, heads, dim = call.q.shape
    kv_heads, block_size = call.kv.shape[2:4]
    block_q = tiles.tokens(call.group)
    listed = call.query_blocks if part.listed else None
    if part.prefix:
        query_blocks = -(-tokens // block_q)
    elif listed is not None:
        query_blocks = len(listed)
    else:
        query_blocks = call.sequences * part.blocks or tokens // block_q + call.sequences
    partial = out if isinstance(out, Partial) else merged
    raw, early = call.raw, overlaps(call.q.device)
    assert segments == 1 or partial is not None
    final = out if isinstance(out, Tensor) else None
    attention_kernel[query_blocks, kv_heads, segments](
        call.q if raw is None else raw.qkv,
        call.kv,
        call.block_tables,
        call.query_start,
        call.context_lens,
        listed,
        call.sinks,
        final,
        partial and partial.out,
        partial and partial.lse,
        None if merged is None else call.arrived,
        raw and raw.positions,
        raw and raw.slot_mapping,
        raw and raw.cos_sin,
        raw and raw.q_norm,
        raw and raw.k_norm,
        raw.eps if raw else 0.0,
        call.sequences,
        part.blocks,
        part.shortest,
        part.longest,
        part.prefix,
        part.suffix,
        segment_base,
        partial.segments if partial else 0,
        partial.room if partial else 0,
        call.scale * call.key_scale,
        call.key_scale,
        call.value_scale,
        call.soft_cap,
        call.q.stride(0),
        *call.kv.stride()[:3],
        call.block_tables.stride(0),
        HEADS=heads,
        GROUP=call.group,
        HEAD_DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        ROW_SIZE=call.kv.shape[4],
        BLOCK_SIZE=block_size,
        WINDOW=call.window,
        CAPPED=call.soft_cap > 0,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        PARTIAL=partial is not None,
        SHORT=part.blocks > 0,
        PREFIX=part.prefix > 0,
        PRECISION="ieee" if call.q.dtype == torch.float32 else "tf32",
        HALF=raw.cos_sin.shape[1] // 2 if raw else 0,
        STORES=raw is not None and raw.stores,
        MERGED=triton.next_power_of_2(call.group),
        AT_ONCE=merged_at_once(call.group, dim),
        OVERLAPS=early,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers,
        launch_pdl=early,
    )
