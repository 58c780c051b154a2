"""Attention in both directions, of an encoder: the tokens of a sequence see each other, and nothing is cached."""

import itertools

import torch
from torch.nn import functional as F

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.torch_paged import split_heads
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.native import encoder_ops

WINDOW_QUERIES = 256
"""Queries that are attended from at once where there is a window: they read no keys that none of them sees."""


class BidirectionalAttention:
    """Attends to whole sequences, any dtype, head size and device: by a native kernel, or torch's one sequence after the other.

    See `AttentionBackend`; `kv` is not looked at.
    """

    name = "bidirectional"
    capturable = False
    cascades = False
    takes_query_blocks = False

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, _kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        q, k, v = split_heads(qkv, layer, meta.positions)
        assert meta.host_lens is not None, "encoders know their lengths on the host"
        starts, seen = meta.host_lens
        if layer.bias is None and layer.head_dim % 16 == 0 and encoder_ops.are_fastest(q.dtype, q.device):
            return encoder_ops.bidirectional_attention(q, k, v, starts, seen, layer.scale, layer.window or 0).flatten(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for (start, end), keys in zip(itertools.pairwise(starts), seen, strict=True):
            _attend(q[start:end], k[start : start + keys], v[start : start + keys], layer, out[start:end], meta)
        return out.flatten(1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionWeights, out: torch.Tensor, meta: AttentionMetadata
) -> None:
    """q [T, H, D], k and v [N, KVH, D] of one sequence, whose first N tokens are seen -> out [T, H, D]."""
    length, window = len(q), layer.window
    if not window or length <= window:
        out.copy_(_attention(q, k, v, layer, None if layer.bias is None else layer.bias(q, k, meta)))
        return
    for first in range(0, length, WINDOW_QUERIES):
        last = min(first + WINDOW_QUERIES, length)
        low = min(max(0, first - window + 1), len(k) - 1)
        high = min(len(k), last + window - 1)
        query_at = torch.arange(first, last, device=q.device).unsqueeze(1)
        key_at = torch.arange(low, high, device=q.device).unsqueeze(0)
        seen = (key_at - query_at).abs() < window
        out[first:last] = _attention(q[first:last], k[low:high], v[low:high], layer, seen)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionWeights, mask: torch.Tensor | None
) -> torch.Tensor:
    """Returns [M, H, D]. `mask` [M, N] says which keys are seen, or [H, M, N] what is added to scores."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    grouped = layer.num_heads != layer.num_kv_heads
    return F.scaled_dot_product_attention(q, k, v, mask, scale=layer.scale, enable_gqa=grouped)[0].transpose(0, 1)
