"""The interface of backends for multi-head latent attention; `mla_shape.py` has its sizes and forms."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.model_config.mla_shape import MlaShape


@dataclass(slots=True)
class MlaWeights:
    """Parameters of one layer except its linear layers.

    scale multiplies scores before the softmax; cos_sin as in `AttentionWeights`, with at most rope_dim columns.
    w_uk [num_heads, nope_dim, kv_rank] and w_uv [num_heads, value_dim, kv_rank] turn latents into keys and values.
    """

    shape: MlaShape
    scale: float
    cos_sin: torch.Tensor
    w_uk: torch.Tensor
    w_uv: torch.Tensor


class MlaBackend(ABC):
    """Causal attention over the latents in the paged cache. Stateless: all state is in the arguments.

    A class rather than a protocol, so that models can distinguish it from an `AttentionBackend`.
    """

    name: str
    capturable: bool
    cascades: bool
    takes_query_blocks: bool
    """All as in `AttentionBackend`."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        c: torch.Tensor,
        k_rope: torch.Tensor,
        layer: MlaWeights,
        kv: torch.Tensor,
        meta: AttentionMetadata,
    ) -> torch.Tensor:
        """Rotates, stores the latents, attends causally, each sequence in the form that costs less.

        q [T, H * key_dim], c [T, kv_rank] normalised, k_rope [T, rope_dim] not yet rotated; kv [num_blocks, block_size,
        row_dim], whose latents are written at meta.slot_mapping. Tokens of sequences for which an indexer has chosen attend to what
        `meta.chosen` says. Returns [T, H * value_dim] in q's dtype.
        """
