"""The indexer of a layer with sparse attention (DeepSeek-V3.2, GLM-5): its matrices, and the step's choice of tokens."""

import torch

from starling_engine.attention.indexer import IndexQuery, choose, spans_to_choose, store_keys
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.linear import stacked
from starling_engine.layers.norm import LayerNorm
from starling_engine.model_config.mla_shape import IndexShape, MlaShape
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot

KEY_EPS = 1e-6
"""Epsilon of the norm of index keys, as in the authors' code."""


class Indexer:
    """Makes index keys, which are cached, and chooses the tokens that each token of a step attends to.

    It is whole on every tensor-parallel rank: all of them choose the same tokens.
    """

    def __init__(self, build: BuildContext, prefix: str, shape: MlaShape, index: IndexShape, rope: int | None) -> None:
        names, hidden = build.names, build.config.hidden_size
        self._q = build.linear(stacked([f"{prefix}.{names.index_q}"], [index.num_heads * index.dim], shape.q_rank))
        self._k = build.linear(stacked([f"{prefix}.{names.index_k}"], [index.dim], hidden))
        self._k_norm = LayerNorm(f"{prefix}.{names.index_k_norm}", index.dim, KEY_EPS, build.dtype, build.device, bias=True)
        self._weights = build.linear(stacked([f"{prefix}.{names.index_weights}"], [index.num_heads], hidden, exact=True))
        self._shape = shape
        self._cos_sin = build.rotations[rope]

    def choose(self, x: torch.Tensor, q_in: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata) -> None:
        """Stores the step's index keys in `kv`, and the choice in `meta`: this layer's, and of those after it that share it.

        x [T, hidden_size] is the layer's input, q_in [T, q_rank] its compressed queries.
        """
        keys, _ = self._k_norm.forward(self._k.forward(x), None)
        store_keys(keys, self._shape, self._cos_sin, kv, meta)
        step = spans_to_choose(self._shape, meta)
        meta.chosen = None
        if step:
            query = IndexQuery(self._q.forward(q_in), self._weights.forward(x, torch.float32))
            meta.chosen = choose(query, self._shape, self._cos_sin, kv, meta, step)

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = (self._q, self._k, self._k_norm, self._weights)
        return {name: slot for part in parts for name, slot in part.weight_slots().items()}
