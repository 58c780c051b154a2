"""What each kernel of `ops` computes, in plain torch with the same signatures. It runs on any device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from starling_engine.native.packed import PackedWeight


def pack_linear(weight: Tensor) -> PackedWeight:
    """Keeps the weight [N, K] as it is."""
    return PackedWeight(weight, *weight.shape)


def linear(
    x: Tensor, packed: PackedWeight, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x [M, K] times the weight, plus bias [N], summed in fp32 -> [M, N] of `out_dtype`."""
    weight = packed.data
    if out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(out_dtype), weight.to(out_dtype), None if bias is None else bias.to(out_dtype))


def embedding_packed(ids: Tensor, packed: PackedWeight, out: Tensor) -> None:
    """Rows ids [T] int64 of the weight -> out [T, K]."""
    torch.index_select(packed.data, 0, ids, out=out)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of q [T, H, D] over the paged cache -> [T, H, D]. For the arguments see `ops`.

    One sequence after another: gathers its keys and values, then masks, softmax in fp32.
    """
    out = torch.empty_like(q)
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.start < rows.stop:
            keys, values = _gather(kv, block_tables[s], context)
            out[rows] = _attend(q[rows], keys, values, scale, window, soft_cap)
    return out


def _gather(kv: Tensor, block_table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values [KVH, context, D] of one sequence."""
    block_size = kv.shape[3]
    blocks = kv[block_table[: -(-context // block_size)].long()]
    both = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return both[0], both[1]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, soft_cap: float) -> Tensor:
    """q [T, H, D], the last T positions, over keys and values [KVH, context, D] -> [T, H, D]."""
    tokens, heads, dim = q.shape
    kv_heads, context, _ = keys.shape
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("tkgd,kcd->kgtc", grouped, keys.float()) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(context - tokens, context, device=q.device)[:, None]
    key = torch.arange(context, device=q.device)[None, :]
    hidden = key > position
    if window > 0:
        hidden = hidden | (key <= position - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    # Keys before the window may lie in blocks that hold anything by now, not-a-numbers too.
    seen = values.float().masked_fill(hidden.all(0)[None, :, None], 0.0)
    return torch.einsum("kgtc,kcd->tkgd", weights, seen).reshape(q.shape).to(q.dtype)
