"""The interface of attention backends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata


@dataclass(slots=True)
class AttentionWeights:
    """Parameters of one attention layer except its linear layers.

    cos_sin [max_position, rotary_dim] fp32 (cosines in the first half, sines in the second; half-split rotation);
    q_norm, k_norm [head_dim] weights of a per-head RMSNorm before rotation, or None; fp32 where the result is rounded only once;
    key_scale, value_scale: a cache of float8_e4m3fn holds keys and values divided by them;
    sinks [num_heads] fp32, or None: one more score for each query of a head, learnt and without a value. It takes part in the
    softmax's denominator alone, so that a query may attend to nothing;
    stores False: qkv has queries alone, [T, num_heads * head_dim]; keys and values are another layer's, and in its cache;
    rotates False: cos_sin leaves all elements as they are;
    bias returns what scores of a sequence get, [num_heads, M, N], for queries [M, num_heads, head_dim], keys [N, ...] and the
    step's metadata; in both directions alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    key_scale: float = 1.0
    value_scale: float = 1.0
    sinks: torch.Tensor | None = None
    stores: bool = True
    rotates: bool = True
    bias: Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor] | None = None


class AttentionBackend(Protocol):
    """Causal attention over the paged cache. All that a step leaves to the next one is in the arguments."""

    name: str
    capturable: bool
    """True where the host has no part in `forward`, so that a step can be recorded and replayed."""
    cascades: bool
    """True where it can attend to `AttentionMetadata.shared_blocks` for all sequences at once."""
    takes_query_blocks: bool
    """True where `AttentionMetadata.query_blocks` spares it programs without work, or the search for each one's sequence."""

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Normalises and rotates, stores keys and values, attends.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim] may be overwritten; its rows may be strided. kv [num_blocks, 2,
        num_kv_heads, block_size, head_dim] is written at meta.slot_mapping; it has qkv's dtype. Where the backend was selected
        for another type of cache, it has rows of that (`native/cache_rows.py`).

        Returns [T, num_heads * head_dim] in qkv's dtype.
        """
        ...
