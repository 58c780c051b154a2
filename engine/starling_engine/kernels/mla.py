"""Attention over the latents themselves (the absorbed form of `model_config/mla_shape.py`), for decode and mixed steps.

All heads share one key and value, so the heads of a token are the rows of one matrix product. A program takes ROWS of them, of
several tokens where one has fewer heads. It reads each latent once for all its rows, as key and as value. Where sequences are too
few to fill the GPU, each context is split into segments, and a second launch joins their results.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import LATENT_ROWS, LATENT_ROWS_FP32, QueryBlocks
from starling_engine.platforms.triton_support import capability

SEGMENT_KEYS = 128
"""Fewest keys of a segment of the context: the segments' results in fp32 would take more traffic than fewer keys."""

LOG2_E = 1.4426950408889634

TINY = tl.constexpr(1e-30)
"""Avoids division by zero for rows without a key."""

JOINED_AT_ONCE = tl.constexpr(16)
"""Segments that a program joins at once: 16 rows of 512 elements are 64 registers a thread."""


@dataclass(frozen=True, slots=True)
class MlaTiles:
    """Sizes of a launch: `heads` times `tokens` are the rows of a program, which reads `keys` at a time."""

    heads: int
    tokens: int
    keys: int
    warps: int
    stages: int


def mla_tiles(num_heads: int, max_query_len: int, dtype: torch.dtype, device: torch.device) -> MlaTiles:
    """Chooses the sizes: up to the 64 rows of Hopper's wgmma, of several tokens where one has fewer heads, and at least 16.

    32 keys of 576 elements leave room for two programs of 16 rows an SM, or for one of 64. Its sums [64, 512] fill two
    warpgroups; with more keys or fewer warps they spill. fp32 has no matrix units without loss, and its latents take twice the
    room.

    The numbers of KV blocks are loaded before their keys: three stages have one tile of keys in flight, 36 KiB. Five have two,
    which programs of 64 rows need, one an SM. They take 181 KiB of shared memory, which cards before Hopper do not have.

    With 64 rows both warpgroups compute the same scores, a third of all products for nothing: Triton shares the first of two
    chained products among warps by rows alone. Past an `if` it does not see the chain and shares them, but computes the softmax in
    two layouts and spills. Keys as rows would need 128 of them, which leave no room for the next ones.
    """
    most = LATENT_ROWS_FP32 if dtype == torch.float32 else LATENT_ROWS
    heads = max(1, min(most, triton.next_power_of_2(num_heads)))
    tokens = 1 if max_query_len == 1 else QueryBlocks.of_latents(num_heads, dtype.itemsize).tokens
    if dtype == torch.float32:
        return MlaTiles(heads, tokens, 16, 4, 1)
    if heads * tokens <= 16:
        return MlaTiles(heads, tokens, 32, 4, 3)
    return MlaTiles(heads, tokens, 32, 8, 5 if capability(device) >= 90 else 3)


def segments_for(programs: int, longest: int, sms: int) -> int:
    """Returns the segments of each context, so that all SMs have a program: a power of two.

    `programs` are those that have work at least, without splitting; `longest` is the longest possible context. Neither depends on
    values on the device.
    """
    wanted = min(sms // max(1, programs), longest // SEGMENT_KEYS)
    return 1 << max(0, wanted.bit_length() - 1)


def attend(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    *,
    sms: int,
    first_sequence: int = 0,
) -> torch.Tensor:
    """Attends to latents. Returns [H, T, kv_rank], to go through W_UV.

    q_latent [H, T, kv_rank]: queries that went through W_UK; q_rope [T, H, rope_dim]; kv [num_blocks, block_size, kv_rank +
    rope_dim], with the step's latents stored. All are contiguous, but for kv's first dimension. Rows of tokens that belong to no
    sequence are undefined; those of a sequence with a context of 0 are zero. Sequences of `meta.query_blocks` count from
    `first_sequence` on. Without a list, each has room for the blocks of the longest.
    """
    heads, tokens, rank = q_latent.shape
    rope, block_size = q_rope.shape[2], kv.shape[1]
    assert kv.stride()[1:] == (rank + rope, 1)
    tiles = mla_tiles(heads, meta.max_query_len, kv.dtype, kv.device)
    listed = meta.query_blocks if meta.max_query_len > 1 else None
    each = triton.cdiv(meta.max_query_len, tiles.tokens)
    blocks = len(meta.context_lens) * each if listed is None else len(listed)
    groups = triton.cdiv(heads, tiles.heads)
    # In a recorded step, rows of padding have blocks without work.
    segments = segments_for(triton.cdiv(tokens, tiles.tokens) * groups, meta.block_tables.shape[1] * block_size, sms)
    out = torch.empty_like(q_latent)
    partial = out if segments == 1 else torch.empty(segments, heads, tokens, rank, dtype=torch.float32, device=out.device)
    lse = torch.empty(segments, heads, tokens, dtype=torch.float32, device=out.device) if segments > 1 else partial
    _attend[(blocks * groups, segments)](
        q_latent,
        q_rope,
        kv,
        meta.block_tables,
        meta.query_start,
        meta.context_lens,
        listed,
        partial,
        lse,
        meta.block_tables.stride(0),
        kv.stride(0),
        tokens,
        heads,
        each,
        first_sequence,
        scale * LOG2_E,
        RANK=rank,
        ROPE=rope,
        RANK_LANES=max(16, triton.next_power_of_2(rank)),
        ROPE_LANES=max(16, triton.next_power_of_2(rope)),
        BLOCK_SIZE=block_size,
        HEADS=tiles.heads,
        TOKENS=tiles.tokens,
        ROWS=max(16, tiles.heads * tiles.tokens),
        KEYS=tiles.keys,
        SPLIT=segments > 1,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if segments > 1:
        lanes = triton.next_power_of_2(rank)
        _join[(heads * tokens,)](partial, lse, out, heads * tokens, segments, RANK=rank, LANES=lanes)
    return out


# A run of sequences may begin anywhere in a step's tables.
@triton.jit(
    do_not_specialize=["num_tokens", "blocks_each", "first_sequence"],
    do_not_specialize_on_alignment=["tables", "query_start", "context_lens", "query_blocks"],
)
def _attend(
    q_latent,
    q_rope,
    kv,
    tables,
    query_start,
    context_lens,
    query_blocks,
    out,
    lse,
    table_stride,
    block_stride,
    num_tokens,
    num_heads,
    blocks_each,
    first_sequence,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_LANES: tl.constexpr,
    ROPE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid [blocks of tokens * groups of heads, segments]. Row r is head r % HEADS of a group, of token r // HEADS of a block.

    `query_blocks` lists the blocks, as `AttentionMetadata` has them, with a sequence of -1 where there is none. Without it each
    sequence has room for `blocks_each`.
    """
    groups = tl.cdiv(num_heads, HEADS)
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    if query_blocks is not None:
        sequence = tl.load(query_blocks + 2 * block) - first_sequence
        if sequence < 0:
            return
        own = tl.load(query_blocks + 2 * block + 1)
    else:
        sequence = block // blocks_each
        own = block % blocks_each
    first = tl.load(query_start + sequence) + own * TOKENS
    end = tl.load(query_start + sequence + 1)
    if first >= end:
        return
    context = tl.load(context_lens + sequence)
    r = tl.arange(0, ROWS)
    token, head = first + r // HEADS, group * HEADS + r % HEADS
    live = (r < HEADS * TOKENS) & (token < end) & (head < num_heads)
    sees = tl.where(live, context - end + token + 1, 0)
    row = head.to(tl.int64) * num_tokens + token
    rank, rope = tl.arange(0, RANK_LANES), tl.arange(0, ROPE_LANES)
    latent_mask, rope_mask = live[:, None] & (rank < RANK)[None, :], live[:, None] & (rope < ROPE)[None, :]
    query_latent = tl.load(q_latent + row[:, None] * RANK + rank[None, :], mask=latent_mask, other=0.0)
    rope_at = (token.to(tl.int64) * num_heads + head)[:, None] * ROPE + rope[None, :]
    query_rope = tl.load(q_rope + rope_at, mask=rope_mask, other=0.0)
    # Not -inf, whose difference to itself is NaN: a segment may begin past the keys that its first rows see.
    top = tl.full([ROWS], -1e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK_LANES], tl.float32)
    # The last of the block's tokens sees most; each segment has whole tiles of that.
    seen = tl.max(sees, 0)
    most = tl.cdiv(tl.cdiv(seen, KEYS), tl.num_programs(1)) * KEYS
    low = tl.program_id(1) * most
    high = tl.minimum(low + most, seen)
    table = tables + sequence.to(tl.int64) * table_stride
    for at in range(low, high, KEYS):
        key = at + tl.arange(0, KEYS)
        inside = key < high
        kv_block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        source = kv + (kv_block * block_stride + key % BLOCK_SIZE * (RANK + ROPE))[:, None]
        # The rest of the last block may be anything, even NaN.
        key_latents = tl.load(source + rank[None, :], mask=inside[:, None] & (rank < RANK)[None, :], other=0.0)
        key_rope = tl.load(source + RANK + rope[None, :], mask=inside[:, None] & (rope < ROPE)[None, :], other=0.0)
        scores = tl.dot(query_latent, tl.trans(key_latents), input_precision="ieee")
        scores = tl.dot(query_rope, tl.trans(key_rope), scores, input_precision="ieee") * scale
        scores = tl.where(key[None, :] < tl.minimum(sees, high)[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(key_latents.dtype), key_latents, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    acc = acc / tl.maximum(total, TINY)[:, None]
    if SPLIT:
        row += tl.program_id(1).to(tl.int64) * num_heads * num_tokens
        tl.store(lse + row, tl.where(total > 0, top + tl.log2(tl.maximum(total, TINY)), float("-inf")), mask=live)
        latent_mask &= (total > 0)[:, None]
    tl.store(out + row[:, None] * RANK + rank[None, :], acc.to(out.dtype.element_ty), mask=latent_mask)


@triton.jit(do_not_specialize=["rows", "segments"])
def _join(partial, lse, out, rows, segments, RANK: tl.constexpr, LANES: tl.constexpr):
    """Joins partial results [segments, rows, RANK], with the log2 of each one's weight -> out [rows, RANK]."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    joined = tl.zeros([LANES], tl.float32)
    for first in range(0, segments, JOINED_AT_ONCE):
        segment = first + tl.arange(0, JOINED_AT_ONCE)
        log = tl.load(lse + segment * rows + row, mask=segment < segments, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(log, 0))
        base = tl.where(new_top > float("-inf"), new_top, 0.0)
        share, shrink = tl.exp2(log - base), tl.exp2(top - base)
        mask = (log > float("-inf"))[:, None] & (lane < RANK)[None, :]
        part = tl.load(partial + (segment[:, None] * rows + row) * RANK + lane[None, :], mask=mask, other=0.0)
        joined = joined * shrink + tl.sum(part * share[:, None], 0)
        total = total * shrink + tl.sum(share, 0)
        top = new_top
    joined = joined / tl.maximum(total, TINY)
    tl.store(out + row * RANK + lane, joined.to(out.dtype.element_ty), mask=lane < RANK)
