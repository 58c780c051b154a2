"""The KV cache in memory: a slab for each block, and each layer's part of them as kernels see it."""

from dataclasses import dataclass

import torch

from starling_engine.kernels.recurrent_state import LayerState


@dataclass(frozen=True, slots=True)
class ParallelCache:
    """Cache of a layer that attends and has a state beside."""

    kv: torch.Tensor
    state: LayerState


@dataclass(frozen=True, slots=True)
class RunCache:
    """Cache of a layer that compresses runs of tokens: rows of the last ones, and the entries of complete runs."""

    window: torch.Tensor
    entries: torch.Tensor


LayerCache = torch.Tensor | LayerState | ParallelCache | RunCache | None
"""Cache of a layer: keys and values [num_blocks, *layer_block_shape] (see `kv/spec.py`), its state, both, or nothing."""


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool's blocks on one rank.

    storage  uint8 [num_blocks, slab_bytes], the slabs
    layers   for each layer of the rank, in order, its part of them: [num_blocks, *layer_block_shape] in the cache's dtype. All
             dimensions but the first are contiguous. See `LayerCache` for those that have others
    """

    storage: torch.Tensor
    layers: list[LayerCache]
