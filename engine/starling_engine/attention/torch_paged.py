"""Paged attention in plain torch: the reference for other backends, and the fallback where they cannot run."""

import torch
from torch.nn import functional as F

from starling_engine.attention.base import AttentionWeights
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.native.cache_rows import cached, uncached


class TorchPagedAttention:
    """Gathers each sequence's blocks and attends with torch's own kernels. Any dtype, head size, device and type of cache."""

    name = "torch"
    capturable = False
    cascades = False
    takes_query_blocks = False

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """See `AttentionBackend`."""
        q, k, v = split_heads(qkv, layer, meta.positions)
        if layer.stores:
            _store(kv, cached(k, kv.dtype, layer.key_scale), cached(v, kv.dtype, layer.value_scale), meta.slot_mapping)
        return _attend(q, layer, kv, meta).flatten(1)


def split_heads(
    qkv: torch.Tensor, layer: AttentionWeights, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [T, row] -> queries [T, H, D], keys and values [T, KVH, D]. Queries and keys are normed and rotated as the layer says.

    A layer that stores nothing has none of the last two.
    """
    heads, kv_heads = qkv.view(qkv.shape[0], -1, layer.head_dim), layer.num_kv_heads if layer.stores else 0
    q, k, v = torch.split(heads, [layer.num_heads, kv_heads, kv_heads], dim=1)
    q, k = _norm(q, layer.q_norm, layer.norm_eps), _norm(k, layer.k_norm, layer.norm_eps)
    if layer.rotates:
        cos, sin = layer.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, k, v


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, heads, D] by cos, sin [T, 1, rotary_dim / 2] fp32, half-split. Elements past rotary_dim stay."""
    half = cos.shape[-1]
    first, second, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    return turned.to(x.dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    # Weights in fp32 beside rounded rows are multiplied before rows are rounded again.
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)


def _store(kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes k, v [T, KVH, row] where `slot_mapping` says. A token with -1 is left out."""
    block_size = kv.shape[3]
    if (slot_mapping < 0).any():
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv[block, 0, :, offset] = k
    kv[block, 1, :, offset] = v


def _attend(q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
    """q [T, H, D] -> [T, H, D], one sequence after the other."""
    out = torch.empty_like(q)
    starts, lengths = meta.lens()
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        first = max(0, length - (end - start) - layer.window + 1) if layer.window else 0
        k, v, seen_from = _gather(kv, meta.block_tables[row], first, length)
        k, v = uncached(k, q.dtype), uncached(v, q.dtype)
        mask = _mask(end - start, length, seen_from, layer.window, q.device)
        out[start:end] = _attend_one(q[start:end], k, v, mask, layer)
    return out


def _gather(kv: torch.Tensor, table: torch.Tensor, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns keys and values [KVH, N, row] of the blocks with positions `first` to `length`, and their first position."""
    block_size = kv.shape[3]
    first_block = first // block_size
    blocks = table[first_block : -(-length // block_size)].long()
    found = kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
    seen_from = first_block * block_size
    return found[0, :, : length - seen_from], found[1, :, : length - seen_from], seen_from


def _mask(queries: int, length: int, seen_from: int, window: int, device: torch.device) -> torch.Tensor:
    """[queries, length - seen_from] bool, true where the query (the last ones of the sequence) sees the key."""
    query_at = torch.arange(length - queries, length, device=device).unsqueeze(1)
    key_at = torch.arange(seen_from, length, device=device).unsqueeze(0)
    seen = key_at <= query_at
    return seen & (key_at > query_at - window) if window else seen


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, layer: AttentionWeights) -> torch.Tensor:
    """q [M, H, D], k and v [KVH, N, D] -> [M, H, D]."""
    q, scale = q.transpose(0, 1), layer.scale * layer.key_scale
    if layer.soft_cap or layer.sinks is not None:
        out = _written_out(q, k, v, mask, scale, layer)
    else:
        grouped = q.shape[0] != k.shape[0]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=grouped)[0]
    return out.transpose(0, 1) * layer.value_scale


def _written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, layer: AttentionWeights
) -> torch.Tensor:
    """Attends with what torch's fused kernel does not have: scores of cap * tanh(score / cap) (Gemma 2), and sinks (gpt-oss)."""
    group = q.shape[0] // k.shape[0]
    keys, values = k.repeat_interleave(group, 0).float(), v.repeat_interleave(group, 0).float()
    scores = q.float() @ keys.transpose(1, 2) * scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if layer.sinks is not None:
        scores = torch.cat([scores, layer.sinks.view(-1, 1, 1).expand(-1, len(mask), 1)], -1)
    weights = scores.softmax(-1)[..., : mask.shape[1]]
    return (weights @ values).to(q.dtype)
