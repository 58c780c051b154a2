"""The pass between the projection of queries, keys and values, and attention: normalises, rotates, stores."""

import triton
import triton.language as tl
from torch import Tensor

from starling_engine.kernels.coded_rows import store_coded
from starling_engine.native.cache_rows import columns

HEADS_AT_ONCE = 16
"""Heads of a program. With 128 elements and 4 warps that is two loads of 16 bytes a thread; one token still fills several SMs."""

WIDE_HEADS_AT_ONCE = 4
"""The same of heads of more than 256 elements, of which more do not fit into the registers."""

FP8_MAX = tl.constexpr(448.0)
"""Largest number of float8_e4m3fn. Larger values are clamped, or they would become NaN."""


@triton.jit
def _normalised(low, high, rest, w_low, w_high, w_rest, eps, HEAD_DIM: tl.constexpr):
    """Divides each row's three parts by the root of its mean square, rounded to the input's type before and after the weight."""
    squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
    inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    return _weighted(low, inverse, w_low), _weighted(high, inverse, w_high), _weighted(rest, inverse, w_rest)


@triton.jit
def _weighted(x, inverse, weight):
    kind: tl.constexpr = weight.dtype
    return ((x * inverse).to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _weights(q_norm, k_norm, at, real, is_key):
    """Returns [heads, at]: k_norm for keys, q_norm for all other heads."""
    q_weight = tl.load(q_norm + at, mask=real, other=0.0)
    k_weight = tl.load(k_norm + at, mask=real, other=0.0)
    return tl.where(is_key[:, None], k_weight[None, :], q_weight[None, :])


@triton.jit
def _put(x, q_out, kv_out, at, real, is_query, is_cached, inverse_scale):
    """Stores rows x at the elements `at`: queries to q_out, keys and values to kv_out, both pointers [heads].

    Rows of codes are stored whole, by `store_whole`.
    """
    tl.store(q_out[:, None] + at[None, :], x.to(q_out.dtype.element_ty), mask=real[None, :] & is_query[:, None])
    if not kv_out.dtype.element_ty.is_int():
        _put_cached(x, kv_out, at, real, is_cached, inverse_scale)


@triton.jit
def _put_cached(x, kv_out, at, real, is_cached, inverse_scale):
    if kv_out.dtype.element_ty == tl.float8e4nv:
        # NaN stays NaN, so that it shows where it is read.
        x = tl.maximum(x * inverse_scale[:, None], -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    tl.store(kv_out[:, None] + at[None, :], x.to(kv_out.dtype.element_ty), mask=real[None, :] & is_cached[:, None])


@triton.jit
def turned(rows, table, norm, exists, eps, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HALF: tl.constexpr):
    """Returns the heads at pointers [heads], as they are and rotated, [heads, PADDED_DIM] fp32. `norm` is of the rotated ones.

    `table` has the cosines and sines of their token. Each column is loaded with the one that it rotates with.
    """
    at = tl.arange(0, PADDED_DIM)
    real = at < HEAD_DIM
    turns = at < 2 * HALF
    partner = tl.where(turns, tl.where(at < HALF, at + HALF, at - HALF), at)
    plain = tl.load(rows[:, None] + at[None, :], mask=exists[:, None] & real[None, :], other=0.0).to(tl.float32)
    other = tl.load(rows[:, None] + partner[None, :], mask=exists[:, None] & real[None, :], other=0.0).to(tl.float32)
    x = plain
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = _weighted(x, inverse, tl.load(norm + at, mask=real, other=0.0)[None, :])
        other = _weighted(other, inverse, tl.load(norm + partner, mask=real, other=0.0)[None, :])
    cosine = tl.load(table + at % HALF, mask=turns, other=1.0)
    sine = tl.load(table + HALF + at % HALF, mask=turns, other=0.0)
    return plain, x * cosine[None, :] + other * tl.where(at < HALF, -sine, sine)[None, :]


@triton.jit
def store_whole(
    rows, table, k_norm, exists, is_value, kv_out, is_cached, eps, inverse_scale,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Stores the keys and values at pointers [heads] to kv_out, pointers [heads]: columns of a row of codes share scales."""
    plain, key = turned(rows, table, k_norm, exists, eps, HEAD_DIM, PADDED_DIM, HALF)
    whole = tl.where(is_value[:, None], plain, key)
    if kv_out.dtype.element_ty.is_int():
        store_coded(whole.to(rows.dtype.element_ty).to(tl.float32), kv_out, is_cached, HEAD_DIM)
    else:
        at = tl.arange(0, PADDED_DIM)
        _put_cached(whole, kv_out, at, at < HEAD_DIM, is_cached, inverse_scale)


@triton.jit
def cached_row(kv, slot, head, is_value, stride_block, stride_value, stride_head, stride_offset, BLOCK_SIZE: tl.constexpr):
    """Returns where the cache has a head's key or value of a token's slot, which is taken for 0 if it is less."""
    place = tl.maximum(slot, 0)
    at = (place // BLOCK_SIZE) * stride_block + (place % BLOCK_SIZE) * stride_offset
    return kv + at + head.to(tl.int64) * stride_head + tl.where(is_value, 1, 0) * stride_value


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])  # a group's slots begin where the group's before end
def _qk_norm_rope_store(
    qkv, positions, cos_sin, q_norm, k_norm, eps, kv, slot_mapping, out, key_scale, value_scale, stride_token, stride_block,
    stride_value, stride_head, stride_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, PADDED_REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, AT_ONCE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (token, AT_ONCE heads). A head has three parts: two halves that rotate with one another, and the rest."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    exists = head < HEADS + 2 * KV_HEADS
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)

    half = tl.arange(0, PADDED_HALF)
    turns = half < HALF
    rest_at = 2 * HALF + tl.arange(0, PADDED_REST)
    stays = rest_at < HEAD_DIM
    rows = qkv + token * stride_token + head * HEAD_DIM
    at = rows[:, None]
    low = tl.load(at + half[None, :], mask=exists[:, None] & turns[None, :], other=0.0).to(tl.float32)
    high = tl.load(at + HALF + half[None, :], mask=exists[:, None] & turns[None, :], other=0.0).to(tl.float32)
    rest = tl.load(at + rest_at[None, :], mask=exists[:, None] & stays[None, :], other=0.0).to(tl.float32)

    x_low, x_high, x_rest = low, high, rest
    if NORM:
        x_low, x_high, x_rest = _normalised(
            low, high, rest, _weights(q_norm, k_norm, half, turns, is_key), _weights(q_norm, k_norm, HALF + half, turns, is_key),
            _weights(q_norm, k_norm, rest_at, stays, is_key), eps, HEAD_DIM,
        )  # fmt: skip
    table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    cosine = tl.load(table + half, mask=turns, other=0.0)[None, :]
    sine = tl.load(table + HALF + half, mask=turns, other=0.0)[None, :]
    plain = is_value[:, None]
    new_low = tl.where(plain, low, x_low * cosine - x_high * sine)
    new_high = tl.where(plain, high, x_high * cosine + x_low * sine)
    new_rest = tl.where(plain, rest, x_rest)

    slot = tl.load(slot_mapping + token).to(tl.int64)
    is_cached = exists & (head >= HEADS) & (slot >= 0)
    cached_head = (head - HEADS) % (KV_HEADS if KV_HEADS > 0 else 1)
    kv_out = cached_row(kv, slot, cached_head, is_value, stride_block, stride_value, stride_head, stride_offset, BLOCK_SIZE)
    q_out = out + (token * HEADS + head) * HEAD_DIM
    inverse_scale = 1.0 / tl.where(is_value, value_scale, key_scale)
    _put(new_low, q_out, kv_out, half, turns, is_query, is_cached, inverse_scale)
    _put(new_high, q_out, kv_out, HALF + half, turns, is_query, is_cached, inverse_scale)
    _put(new_rest, q_out, kv_out, rest_at, stays, is_query, is_cached, inverse_scale)
    if kv.dtype.element_ty.is_int():  # noqa: SIM102 - known when this is compiled, the other condition when it runs
        if (tl.program_id(1) + 1) * AT_ONCE > HEADS:
            store_whole(
                rows, table, k_norm, exists, is_value, kv_out, is_cached, eps, inverse_scale, HEAD_DIM, PADDED_DIM, HALF
            )  # fmt: skip


def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    stores: bool = True,
) -> Tensor:
    """Splits qkv [T, (H + 2 KVH) D]; keys and values go to kv [num_blocks, 2, KVH, block_size, D], queries come back [T, H, D].

    positions [T] and slot_mapping [T], of which -1 stores nothing. cos_sin [max_position, rotary_dim] fp32 and the norms [D], or
    None, as in `AttentionWeights`; both norms or neither. Norm and rotation are in fp32, rounded as in `native.reference`.

    A cache of float8_e4m3fn gets keys and values divided by key_scale and value_scale, clamped to its largest number. One of int8
    or uint8 has rows in place of D elements, as `cache_rows` makes them. Unless it `stores`, qkv is [T, H D].
    """
    tokens, width = qkv.shape
    kv_heads, block_size, dim = kv.shape[2] if stores else 0, kv.shape[3], columns(kv)
    heads, half = width // dim - 2 * kv_heads, cos_sin.shape[1] // 2
    assert (q_norm is None) == (k_norm is None) and qkv.stride(1) == 1 and kv.stride(4) == 1
    out = qkv.new_empty(tokens, heads, dim)
    at_once = HEADS_AT_ONCE if dim <= 256 else WIDE_HEADS_AT_ONCE
    _qk_norm_rope_store[tokens, triton.cdiv(heads + 2 * kv_heads, at_once)](
        qkv,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        eps,
        kv,
        slot_mapping,
        out,
        key_scale,
        value_scale,
        qkv.stride(0),
        *kv.stride()[:4],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        HALF=half,
        PADDED_HALF=triton.next_power_of_2(half),
        PADDED_REST=triton.next_power_of_2(max(dim - 2 * half, 1)),
        BLOCK_SIZE=block_size,
        AT_ONCE=at_once,
        NORM=q_norm is not None,
        num_warps=4,
    )
    return out
