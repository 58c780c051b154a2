"""What every attention backend is given and promises."""

from dataclasses import dataclass
from typing import Protocol

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata


@dataclass(slots=True)
class AttentionWeights:
    """What one attention layer brings besides its linear layers.

    cos_sin [max_position, rotary_dim] fp32 (cosines in the first half, sines in the second; half-split rotation);
    q_norm, k_norm [head_dim] weights of a per-head RMSNorm before rotation, or None;
    key_scale, value_scale are for a cache of float8_e4m3fn, which holds keys and values over them.
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


class AttentionBackend(Protocol):
    """Causal attention over the paged cache. Stateless: all state is in the arguments."""

    name: str
    capturable: bool
    """Whether `forward` asks nothing of the host, so that it can be recorded and replayed."""
    cascades: bool
    """Whether it attends to `AttentionMetadata.shared_blocks` for all sequences at once, where that pays."""

    def forward(self, qkv: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Normalises and rotates, stores keys and values, attends.

        qkv [T, (num_heads + 2 * num_kv_heads) * head_dim]; may be overwritten. kv [num_blocks, 2, num_kv_heads, block_size,
        head_dim], of qkv's dtype or, where the backend was selected for that, float8_e4m3fn, is written at meta.slots. Returns
        [T, num_heads * head_dim] in qkv's dtype.
        """
        ...
