"""Attention by the package flash-attn (its interface since 2.6), where it is asked for. Imports flash_attn and triton.

Its paged kernel needs blocks of 256 tokens, and ours are smaller, so keys and values are gathered for each layer.
"""

import torch
from flash_attn import flash_attn_varlen_func

from starling_engine.attention.base import AttentionWeights
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.store import qk_norm_rope_store


class FlashAttention:
    """bf16 or fp16, heads of at most 256 elements. Waits for the device: its steps are not captured. See `AttentionBackend`."""

    name = "flash_attn"
    capturable = False
    cascades = False
    takes_query_blocks = False

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """See `AttentionBackend`."""
        q = qk_norm_rope_store(
            *(qkv, meta.positions, layer.cos_sin, layer.q_norm, layer.k_norm, layer.norm_eps, kv, meta.slot_mapping),
            stores=layer.stores,
        )
        keys, values, key_start, longest = gather(kv, meta, layer.window)
        out: torch.Tensor = flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=meta.query_start,
            cu_seqlens_k=key_start,
            max_seqlen_q=meta.max_query_len,
            max_seqlen_k=longest,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(layer.window - 1, 0) if layer.window else (-1, -1),
            softcap=layer.soft_cap,
        )
        return out.flatten(1)


def gather(kv: torch.Tensor, meta: AttentionMetadata, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Gathers the keys and values [N, KVH, D] that some query sees.

    Returns also where each sequence begins in them [S + 1] int32, and the longest sequence. Tokens before the window are left out:
    their blocks may hold anything by now. Causality counts from the end, so it still holds.
    """
    lengths = meta.context_lens
    first = torch.zeros_like(lengths)
    if window:
        first = (lengths - meta.query_start.diff() - window + 1).clamp(min=0)
    counts = (lengths - first).long()
    start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = torch.repeat_interleave(counts)
    at = torch.arange(len(row), device=kv.device) - start[row] + first[row]
    block, offset = meta.block_tables[row, at // kv.shape[3]].long(), at % kv.shape[3]
    return kv[block, 0, :, offset], kv[block, 1, :, offset], start.int(), int(counts.max())
