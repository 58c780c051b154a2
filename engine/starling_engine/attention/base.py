"""What every attention backend is given and promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """One step's view of one KV group. Made anew each step; valid until the step ends.

    Sequences lie one behind the other in the step's flat token axis of T tokens.

    positions     [T] int64, each token's position in its sequence
    slots         [T] int64, block * block_size + offset where the token's keys and values go; -1 stores nothing, and is for tokens
                  that only fill the step up
    query_start   [S + 1] int32, first token of each sequence in the step; the last entry is T
    context_lens  [S] int32, tokens of each sequence in the cache once this step's are stored
    block_tables  [S, max_blocks] int32; blocks outside the window are 0 and never read
    max_query_len longest query of the step; 1 means a pure decode step
    shared_blocks leading blocks that all sequences share and that were full before this step, as
                  `kernels.attention_plan.common_prefix` counts them: a backend may attend to them for all sequences at once
    host_lens     query_start and context_lens as the host knows them, where it does; nothing waits for the device to read them
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    shared_blocks: int = 0
    host_lens: tuple[Sequence[int], Sequence[int]] | None = None


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
