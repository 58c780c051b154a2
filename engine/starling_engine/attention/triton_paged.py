"""Paged attention by Triton's kernels: one pass to normalise, rotate and store, one to attend. Imports triton."""

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.prompts import HeadShape, PromptLibrary, head_shape, is_plain, prompt_chunks
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import cascade_pays
from starling_engine.kernels.paged_attention import AttentionCall, attend, cascade_attention
from starling_engine.kernels.store import qk_norm_rope_store
from starling_engine.platforms.triton_support import sms


class TritonAttention:
    """bf16, fp16 or fp32, a cache of that or of fewer bits, heads of at most 512 elements; see `AttentionBackend`.

    Needs `triton_runs`. Does not wait for the device. Its launches depend on shapes, max_query_len and shared_blocks alone, so a
    step can be captured.

    `libraries` compute the attention of prompts that have a step for themselves; see `prompts`. Such steps are not recorded.
    """

    name = "triton"
    capturable = True
    cascades = True
    takes_query_blocks = True

    def __init__(self) -> None:
        self.libraries: dict[HeadShape, PromptLibrary] = {}

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """See `AttentionBackend`."""
        q = qk_norm_rope_store(
            qkv,
            meta.positions,
            layer.cos_sin,
            layer.q_norm,
            layer.k_norm,
            layer.norm_eps,
            kv,
            meta.slot_mapping,
            stores=layer.stores,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
        )
        return self.attend(q, layer, kv, meta)

    def attend(self, q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """See `AttendsToStored`."""
        call = AttentionCall(
            q=q,
            kv=kv,
            block_tables=meta.block_tables,
            query_start=meta.query_start,
            context_lens=meta.context_lens,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            query_blocks=meta.query_blocks,
            key_scale=layer.key_scale,
            value_scale=layer.value_scale,
        )
        shared = 0 if layer.window else meta.shared_blocks * kv.shape[3]
        if cascade_pays(call.shape, shared, sms(q.device)):
            return cascade_attention(call, shared, meta.max_query_len).flatten(1)
        out = self._by_library(q, layer, kv, meta)
        return (attend(call, meta.max_query_len) if out is None else out).flatten(1)

    def _by_library(
        self, q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor | None:
        """Returns the attention of a step of long prompts; None where the step, or the layer, is Triton's."""
        library = self.libraries.get(head_shape(layer)) if is_plain(layer, q.dtype, kv) else None
        if library is None or not (chunks := prompt_chunks(meta)):
            return None
        meta.by_library = True
        parts = [library.attend(q[each.start : each.end], kv, each, layer.scale) for each in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
