"""Rotates the shared part of queries and keys and stores the step's latents, in one launch."""

import torch
import triton
import triton.language as tl

HEADS = 16
"""Heads that one program rotates."""


def rotate_and_store(
    q: torch.Tensor,
    c: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Stores the step's latents in kv [num_blocks, block_size, kv_rank + rope_dim], contiguous but for the first dimension.

    q [T, H, key_dim], of which the last rope_dim are rotated; c [T, kv_rank]; k_rope [T, rope_dim]; cos_sin [max_position,
    at most rope_dim] fp32, which leaves further pairs as they are; positions and slot_mapping as in `AttentionMetadata`.

    Returns the rotated queries [T, H, rope_dim]. `interleaved` pairs lie side by side. They come out in two halves, in queries and
    keys alike: the order does not matter to a dot product.
    """
    (tokens, heads, key_dim), rank, rope = q.shape, c.shape[1], k_rope.shape[1]
    assert kv.stride()[1:] == (rank + rope, 1)
    out = q.new_empty(tokens, heads, rope)
    _rotate_and_store[(tokens, 1 + triton.cdiv(heads, HEADS))](
        q,
        c,
        k_rope,
        positions,
        cos_sin,
        kv,
        slot_mapping,
        out,
        q.stride(0),
        q.stride(1),
        c.stride(0),
        k_rope.stride(0),
        kv.stride(0),
        heads,
        BLOCK_SIZE=kv.shape[1],
        NOPE=key_dim - rope,
        RANK=rank,
        HALF=rope // 2,
        TURNED=cos_sin.shape[1] // 2,
        INTERLEAVED=interleaved,
        HEADS=HEADS,
        RANK_LANES=triton.next_power_of_2(rank),
        HALF_LANES=triton.next_power_of_2(rope // 2),
    )
    return out


@triton.jit
def _rotate_and_store(
    q,
    c,
    k_rope,
    positions,
    cos_sin,
    kv,
    slot_mapping,
    out,
    q_stride,
    head_stride,
    c_stride,
    k_stride,
    block_stride,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK_LANES: tl.constexpr,
    HALF_LANES: tl.constexpr,
):
    """Grid [T, 1 + heads / HEADS]: the first program of a token stores, the others rotate some heads each."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF_LANES)
    low = pair * 2 if INTERLEAVED else pair
    high = low + 1 if INTERLEAVED else low + HALF
    table = cos_sin + tl.load(positions + token) * (2 * TURNED)
    cosine = tl.load(table + pair, mask=pair < TURNED, other=1.0)
    sine = tl.load(table + TURNED + pair, mask=pair < TURNED, other=0.0)
    if part == 0:
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            row = kv + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (RANK + 2 * HALF)
            at = tl.arange(0, RANK_LANES)
            tl.store(row + at, tl.load(c + token * c_stride + at, mask=at < RANK), mask=at < RANK)
            key = k_rope + token * k_stride
            first = tl.load(key + low, mask=pair < HALF).to(tl.float32)
            second = tl.load(key + high, mask=pair < HALF).to(tl.float32)
            _store_rotated(row + RANK + pair, first, second, cosine, sine, pair < HALF, HALF)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < num_heads) & (pair < HALF)[None, :]
        query = q + token * q_stride + head * head_stride + NOPE
        first = tl.load(query + low[None, :], mask=mask).to(tl.float32)
        second = tl.load(query + high[None, :], mask=mask).to(tl.float32)
        rows = out + (token * num_heads + head) * (2 * HALF) + pair[None, :]
        _store_rotated(rows, first, second, cosine[None, :], sine[None, :], mask, HALF)


@triton.jit
def _store_rotated(at, first, second, cosine, sine, mask, HALF: tl.constexpr):
    tl.store(at, (first * cosine - second * sine).to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (second * cosine + first * sine).to(at.dtype.element_ty), mask=mask)
