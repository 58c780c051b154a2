"""Queries, keys and values of a few rows, from the norm of the residual stream to the cache, in one launch: see `few_rows`.

A program has columns of one head: as many of either half, which rotate with one another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.few_rows import few_rows_tile, halves, products
from starling_engine.kernels.fused_rows import HEAD_COLUMNS, MOST_ROWS, HeadStore, RowNorm
from starling_engine.kernels.store import put
from starling_engine.platforms.triton_support import sms


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slot_mapping"])
def _few_rows_heads(
    x, norm, weight, bias, positions, cos_sin, kv, slot_mapping, out, rows, eps, key_scale, value_scale, stride_block,
    stride_value, stride_head, stride_offset,
    DEPTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (COLUMNS of a head)."""
    HALF: tl.constexpr = HEAD_DIM // 2
    OWN: tl.constexpr = COLUMNS // 2
    head = tl.program_id(0) // (HALF // OWN)
    first = tl.program_id(0) % (HALF // OWN) * OWN
    place = tl.arange(0, COLUMNS)
    column = head * HEAD_DIM + first + place % OWN + place // OWN * HALF
    sums = products(x, norm, weight, bias, column, rows, eps, DEPTH, ROWS, TILE_DEPTH, PRECISION)
    # Rounded as they were between two launches.
    low, high = halves(sums.to(x.dtype.element_ty).to(tl.float32))

    row = tl.arange(0, ROWS)
    at = first + tl.arange(0, OWN)
    live = row < rows
    is_value = head >= HEADS + KV_HEADS
    table = cos_sin + tl.load(positions + row, mask=live, other=0).to(tl.int64)[:, None] * HEAD_DIM + at[None, :]
    cosine = tl.load(table, mask=live[:, None], other=0.0)
    sine = tl.load(table + HALF, mask=live[:, None], other=0.0)
    new_low = tl.where(is_value, low, low * cosine - high * sine)
    new_high = tl.where(is_value, high, high * cosine + low * sine)

    slot = tl.load(slot_mapping + row, mask=live, other=-1).to(tl.int64)
    is_query = live & (head < HEADS)
    is_cached = live & (head >= HEADS) & (slot >= 0)
    place_of = tl.maximum(slot, 0)
    cached_head = tl.maximum(head - HEADS, 0) % KV_HEADS
    kv_out = kv + place_of // BLOCK_SIZE * stride_block + place_of % BLOCK_SIZE * stride_offset
    kv_out += cached_head.to(tl.int64) * stride_head + tl.where(is_value, 1, 0) * stride_value
    q_out = out + (row * HEADS + head) * HEAD_DIM
    inverse_scale = 1.0 / tl.where(is_value & live, value_scale, key_scale)
    put(new_low, q_out, kv_out, at, at < HALF, is_query, is_cached, inverse_scale)
    put(new_high, q_out, kv_out, HALF + at, at < HALF, is_query, is_cached, inverse_scale)


def few_rows_heads(x: Tensor, weight: Tensor, bias: Tensor | None, norm: RowNorm, store: HeadStore) -> Tensor:
    """Multiplies the norm of x [M, K], M <= MOST_ROWS, by weight [(H + 2 KVH) D, K], and adds bias, rotates and stores.

    Queries come back [M, H, D]. See `few_rows_linear`, and `qk_norm_rope_store` for what is stored; the whole head rotates.
    """
    rows, depth = x.shape
    kv_heads, block_size, dim = store.kv.shape[2:]
    heads = len(weight) // dim - 2 * kv_heads
    assert 0 < rows <= MOST_ROWS and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float32)
    assert weight.shape == ((heads + 2 * kv_heads) * dim, depth) and norm.weight.shape == (depth,) and store.takes(dim)
    assert all(each is None or each.is_contiguous() for each in (x, weight, bias, store.cos_sin)) and store.kv.stride(4) == 1
    out = torch.empty(rows, heads, dim, dtype=x.dtype, device=x.device)
    tile = few_rows_tile(rows, len(weight), sms(x.device), normed=True)
    _few_rows_heads[(len(weight) // HEAD_COLUMNS,)](
        x,
        norm.weight,
        weight,
        bias,
        store.positions,
        store.cos_sin,
        store.kv,
        store.slot_mapping,
        out,
        rows,
        norm.eps,
        store.key_scale,
        store.value_scale,
        *store.kv.stride()[:4],
        DEPTH=depth,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        BLOCK_SIZE=block_size,
        ROWS=MOST_ROWS,
        COLUMNS=HEAD_COLUMNS,
        TILE_DEPTH=tile.depth if x.dtype == torch.bfloat16 else tile.depth // 4,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
