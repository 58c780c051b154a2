"""Paged attention by the native CPU kernels: one pass to normalise, rotate and store, one to attend."""

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.native import ops

DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_DIM = 512
HEAD_DIM_STEP = 16


class NativeAttention:
    """Needs `native.load()`; see `AttentionBackend`.

    The dtype is one of DTYPES, the cache of that or of a type of `native/cache_rows.py`; the head size is a multiple of 16, at most
    512.
    """

    name = "native"
    capturable = False
    cascades = False
    takes_query_blocks = False

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        scales = layer.key_scale, layer.value_scale
        q = ops.qk_norm_rope_store(
            *(qkv, meta.positions, layer.cos_sin, layer.q_norm, layer.k_norm, layer.norm_eps, kv, meta.slot_mapping, *scales),
            stores=layer.stores,
        )
        out = ops.paged_attention(
            q,
            kv,
            meta.block_tables,
            meta.query_start,
            meta.context_lens,
            layer.scale,
            layer.window,
            layer.soft_cap,
            *scales,
            layer.sinks,
        )
        return out.view(out.shape[0], -1)
