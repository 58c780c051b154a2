"""Attention by the package flashinfer, where a user chooses it. Imports flashinfer and triton."""

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from starling_engine.attention.base import AttentionWeights
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.store import qk_norm_rope_store

WORKSPACE = 128 << 20
"""Bytes for flashinfer's partial results, as its documentation advises."""


class FlashInferAttention:
    """bf16 or fp16, heads of 64, 128 or 256 elements. Waits for the device to plan a step, so CUDA graphs do not capture steps.

    Keeps the plan of the last step's metadata, which the layers of a KV group share. See `AttentionBackend`.
    """

    name = "flashinfer"
    capturable = False
    cascades = False
    takes_query_blocks = False

    def __init__(self) -> None:
        self._wrapper: BatchPrefillWithPagedKVCacheWrapper | None = None
        self._planned: tuple[AttentionMetadata, AttentionWeights] | None = None

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """See `AttentionBackend`."""
        q = qk_norm_rope_store(
            *(qkv, meta.positions, layer.cos_sin, layer.q_norm, layer.k_norm, layer.norm_eps, kv, meta.slot_mapping),
            stores=layer.stores,
        )
        if self._wrapper is None:
            workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=kv.device)
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        if self._planned is None or not _same_plan(self._planned, (meta, layer)):
            self._planned = None
            self._plan(self._wrapper, layer, kv, meta)
            self._planned = meta, layer
        out: torch.Tensor = self._wrapper.run(q, kv)
        return out.flatten(1)

    def _plan(
        self, wrapper: BatchPrefillWithPagedKVCacheWrapper, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        indptr, indices, last_page_len = block_lists(meta, kv.shape[3], layer.window)
        wrapper.plan(
            meta.query_start,
            indptr,
            indices,
            last_page_len,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            kv.shape[3],
            causal=True,
            sm_scale=layer.scale,
            window_left=layer.window - 1 if layer.window else -1,
            logits_soft_cap=layer.soft_cap or None,
            q_data_type=kv.dtype,
            kv_data_type=kv.dtype,
        )


def block_lists(meta: AttentionMetadata, block_size: int, window: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lists the blocks that some query sees, one sequence behind the other, all int32.

    Returns flashinfer's paged_kv_indptr [S + 1], paged_kv_indices, and paged_kv_last_page_len [S]. Whole blocks before the window
    are left out: other sequences may have them by now. The causal mask counts from the last key, so it still holds.
    """
    lengths = meta.context_lens.long()
    first = torch.zeros_like(lengths)
    if window:
        first = (lengths - meta.query_start.diff() - window + 1).clamp(min=0) // block_size
    counts = (lengths + block_size - 1) // block_size - first
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row = torch.repeat_interleave(counts)
    at = torch.arange(len(row), device=lengths.device) - indptr[row] + first[row]
    return indptr.int(), meta.block_tables[row, at], (lengths - 1).remainder(block_size).add(1).int()


def _same_plan(old: tuple[AttentionMetadata, AttentionWeights], new: tuple[AttentionMetadata, AttentionWeights]) -> bool:
    """Compares the metadata by identity: another step's tensors may hold other values."""
    fields = ("num_heads", "num_kv_heads", "head_dim", "scale", "window", "soft_cap")
    return old[0] is new[0] and all(getattr(old[1], field) == getattr(new[1], field) for field in fields)
