"""Multi-head latent attention (MLA) of DeepSeek-V2 and V3, arXiv 2405.04434, section 2.1, and with V3.2's indexer."""

from dataclasses import replace

import torch

from starling_engine.attention.mla_base import MlaBackend, MlaWeights
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.linear import stacked
from starling_engine.layers.rope import mscale_all_dim
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.models.build_context import BuildContext
from starling_engine.models.indexer import Indexer
from starling_engine.parallel.rank_part import Rows
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, part_slot

LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values, as in the authors' code; the model's other norms may differ."""


class LatentAttention:
    """Compresses queries, keys and values; only the latent of keys and values is cached, one for all heads.

    One matrix compresses keys and values, and queries where the model does so. It and the cache are whole on every rank; the heads
    are split.
    """

    _weights: MlaWeights

    def __init__(self, build: BuildContext, prefix: str, shape: MlaShape, layer: LayerConfig) -> None:
        """Makes the attention of a layer. Without a rotary embedding the common part of keys is as it is."""
        assert isinstance(build.backend, MlaBackend), "selected for a model without latents"
        config, names = build.config, build.names
        share = build.tensor.shard.of(shape.num_heads)
        shape = replace(shape, num_heads=share.size)
        q, down, sizes = names.q, [names.kv_a], [shape.latent_dim]
        self._q_norm = None
        if shape.q_rank:
            q, down, sizes = names.q_b, [names.q_a, *down], [shape.q_rank, *sizes]
            self._q_norm = build.norm(f"{prefix}.{names.q_a_norm}", shape.q_rank, LATENT_EPS)
        self._down = build.linear(stacked([f"{prefix}.{name}" for name in down], sizes, config.hidden_size, config.traits.qkv_bias))
        self._q = build.linear(stacked([f"{prefix}.{q}"], [share.times(shape.key_dim)], shape.q_rank or config.hidden_size))
        self._kv_norm = build.norm(f"{prefix}.{names.kv_a_norm}", shape.kv_rank, LATENT_EPS)
        self._kv_b = f"{prefix}.{names.kv_b}.weight"
        self._o = build.linear(
            stacked([f"{prefix}.{names.o}"], [config.hidden_size], share.times(shape.value_dim), config.traits.o_bias)
        )
        self._indexer: Indexer | None = None
        if shape.index is not None and not layer.shares_choice:
            self._indexer = Indexer(build, prefix, shape, shape.index, layer.rope)
        self._build = build
        self._shape = shape
        self._rope = layer.rope
        self._arithmetic = build.arithmetic
        self._temperature = layer.temperature
        self._heads = share
        self._attend = build.backend.forward

    def forward_part(self, x: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> Rows:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; writes the step's latents into `kv`.

        The sum is left to the caller, where ranks make one.
        """
        shape = self._shape
        c_q, c_kv, k_rope = torch.split(self._down.forward(x), [shape.q_rank, shape.kv_rank, shape.rope_dim], dim=-1)
        q_in = x if self._q_norm is None else self._q_norm.forward(c_q.contiguous(), None)[0]
        if self._indexer is not None:
            self._indexer.choose(x, q_in, kv, meta)
        c, _ = self._kv_norm.forward(c_kv.contiguous(), None)
        q = self._q.forward(q_in)
        if self._temperature is not None:
            self._arithmetic.temper(q, meta.positions, self._temperature)
        out = self._attend(q, c, k_rope, self._weights, kv, meta)
        return self._o.forward_part(out if rows is None else out[rows])

    def weight_slots(self) -> dict[str, WeightSlot]:
        shape = self._shape
        rows = self._heads.times(shape.nope_dim + shape.value_dim)
        norm = {} if self._q_norm is None else self._q_norm.weight_slots()
        indexer = {} if self._indexer is None else self._indexer.weight_slots()
        kv_b = {self._kv_b: part_slot((rows, Share.all(shape.kv_rank)), self._load_kv_b)}
        return {
            **self._down.weight_slots(),
            **norm,
            **self._q.weight_slots(),
            **indexer,
            **self._kv_norm.weight_slots(),
            **kv_b,
            **self._o.weight_slots(),
        }

    def _load_kv_b(self, tensor: torch.Tensor) -> None:
        """Splits kv_b_proj, whose rows are each head's W_UK and then its W_UV."""
        shape, build = self._shape, self._build
        heads = tensor.reshape(shape.num_heads, shape.nope_dim + shape.value_dim, shape.kv_rank)
        w_uk, w_uv = (
            torch.empty(part.shape, dtype=build.dtype, device=build.device).copy_(part)
            for part in torch.split(heads, [shape.nope_dim, shape.value_dim], dim=1)
        )
        rope = self._rope
        scale = shape.key_dim**-0.5 * (1.0 if rope is None else mscale_all_dim(build.config.ropes[rope]) ** 2)
        self._weights = MlaWeights(shape, scale, build.rotations[rope], w_uk, w_uv)
