"""Attention over keys and values that are made of latents: the expanded form of `model_config/mla_shape.py`, for long prompts."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def attend(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attends causally from the last M tokens of a sequence of N -> out [M, H, value_dim].

    q_nope and k_nope [M or N, H, nope_dim], q_rope [M, H, rope_dim], k_rope [N, rope_dim] of all heads, v [N, H, value_dim]; the
    last dimension of each has stride 1.
    """
    (queries, heads, nope), rope, value = q_nope.shape, q_rope.shape[2], v.shape[2]
    narrow = out.dtype != torch.float32
    rows, keys = (128, 64) if narrow else (16, 16)
    _attend[(triton.cdiv(queries, rows), heads)](
        q_nope,
        q_rope,
        k_nope,
        k_rope,
        v,
        out,
        queries,
        len(k_nope),
        scale * LOG2_E,
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        k_nope.stride(0),
        k_nope.stride(1),
        k_rope.stride(0),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        NOPE=nope,
        ROPE=rope,
        VALUE=value,
        NOPE_LANES=max(16, triton.next_power_of_2(nope)),
        ROPE_LANES=max(16, triton.next_power_of_2(rope)),
        VALUE_LANES=max(16, triton.next_power_of_2(value)),
        ROWS=rows,
        KEYS=keys,
        num_warps=8 if narrow else 4,
        num_stages=3 if narrow else 1,
    )


@triton.jit(do_not_specialize=["queries", "context"])
def _attend(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    v,
    out,
    queries,
    context,
    scale,
    q_nope_token,
    q_nope_head,
    q_rope_token,
    q_rope_head,
    k_nope_token,
    k_nope_head,
    k_rope_token,
    v_token,
    v_head,
    out_token,
    out_head,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_LANES: tl.constexpr,
    ROPE_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Grid [blocks of ROWS queries, heads]; the blocks that see the most keys come first, so that the last to start are short."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live, sees = row < queries, context - queries + row + 1
    nope, rope, value = tl.arange(0, NOPE_LANES), tl.arange(0, ROPE_LANES), tl.arange(0, VALUE_LANES)
    query_nope = _rows(q_nope + head * q_nope_head, row, q_nope_token, live, nope, NOPE)
    query_rope = _rows(q_rope + head * q_rope_head, row, q_rope_token, live, rope, ROPE)
    top = tl.full([ROWS], -1e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_LANES], tl.float32)
    for at in range(0, tl.minimum(context, context - queries + (block + 1) * ROWS), KEYS):
        key = at + tl.arange(0, KEYS)
        inside, source = key < context, key.to(tl.int64)
        keys = _rows(k_nope + head * k_nope_head, source, k_nope_token, inside, nope, NOPE)
        key_rope = _rows(k_rope, source, k_rope_token, inside, rope, ROPE)
        values = _rows(v + head * v_head, source, v_token, inside, value, VALUE)
        scores = tl.dot(query_nope, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(query_rope, tl.trans(key_rope), scores, input_precision="ieee") * scale
        scores = tl.where(key[None, :] < tl.minimum(sees, context)[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    acc = acc / total[:, None]
    at = out + head * out_head + row[:, None] * out_token + value[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live[:, None] & (value < VALUE)[None, :])


@triton.jit
def _rows(base, row, stride, mask, lane, WIDTH: tl.constexpr):
    """Loads [rows, lanes]; zeros where the mask or the width ends."""
    return tl.load(base + row[:, None] * stride + lane[None, :], mask=mask[:, None] & (lane < WIDTH)[None, :], other=0.0)
