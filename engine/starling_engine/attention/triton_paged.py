"""Paged attention by Triton's kernels. A decode is one launch; other steps have one before, to normalise, rotate and store.

Imports triton.
"""

import logging

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.prompts import HeadShape, PromptLibrary, head_shape, is_plain, prompt_chunks
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import cascade_pays
from starling_engine.kernels.paged_attention import AttentionCall, RawHeads, attend, cascade_attention, most_arrived
from starling_engine.platforms.triton_support import sms

logger = logging.getLogger("starling.attention")


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
        self._arrived: torch.Tensor | None = None
        self.libraries: dict[HeadShape, PromptLibrary] = {}

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """See `AttentionBackend`."""
        raw = RawHeads(
            qkv=qkv,
            positions=meta.positions,
            slot_mapping=meta.slot_mapping,
            cos_sin=layer.cos_sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=layer.norm_eps,
            stores=layer.stores,
        )
        call = self._call(raw.queries(layer.head_dim, kv.shape[2]), layer, kv, meta, raw)
        if meta.max_query_len == 1 and not cascade_pays(call.shape, _shared(layer, kv, meta), sms(qkv.device)):
            return attend(call, 1).flatten(1)
        return self._attend_stored(call.stored(), layer, meta, or_triton=True)

    def attend(
        self, q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata, *, or_triton: bool = False
    ) -> torch.Tensor:
        """See `TakesLibraries`."""
        return self._attend_stored(self._call(q, layer, kv, meta), layer, meta, or_triton=or_triton)

    def _call(
        self, q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata, raw: RawHeads | None = None
    ) -> AttentionCall:
        return AttentionCall(
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
            raw=raw,
            arrived=self._zeros(q.device),
        )

    def _attend_stored(
        self, call: AttentionCall, layer: AttentionWeights, meta: AttentionMetadata, *, or_triton: bool
    ) -> torch.Tensor:
        shared = _shared(layer, call.kv, meta)
        if cascade_pays(call.shape, shared, sms(call.q.device)):
            return cascade_attention(call, shared, meta.max_query_len).flatten(1)
        try:
            out = self._by_library(call.q, layer, call.kv, meta)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:  # memory, or a size that it has no plan for
            if not or_triton:
                raise
            library, out = self.libraries.pop(head_shape(layer)), None
            logger.warning("attention of prompts by %s failed, from now on Triton computes it: %s", library.name, error)
        return (attend(call, meta.max_query_len) if out is None else out).flatten(1)

    def _zeros(self, device: torch.device) -> torch.Tensor:
        """Returns what programs of a launch count in. Launches follow one another, and each leaves zeros to the next."""
        if self._arrived is None or self._arrived.device != device:
            self._arrived = torch.zeros(most_arrived(device), dtype=torch.int32, device=device)
        return self._arrived

    def _by_library(
        self, q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata
    ) -> torch.Tensor | None:
        """Returns the attention of a step of long prompts; None where the step, or the layer, is Triton's."""
        library = self.libraries.get(head_shape(layer)) if is_plain(layer, q.dtype, kv) else None
        if library is None or not (chunks := prompt_chunks(meta)):
            return None
        parts = [library.attend(q[each.start : each.end], kv, each, layer.scale) for each in chunks]
        meta.by_library = True
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _shared(layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> int:
    """Returns how many first tokens all sequences share, as far as the layer sees them."""
    return 0 if layer.window else meta.shared_blocks * kv.shape[3]
