"""A decoder layer and its attention.

Another kind of attention or MLP is another class with the same `forward` and `weight_slots`.
"""

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.mla_base import MlaBackend
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.linear import stacked
from starling_engine.models.build_context import BuildContext
from starling_engine.models.mla import LatentAttention
from starling_engine.models.mlp import Mlp
from starling_engine.models.moe_block import MoeBlock
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class Attention:
    """Grouped-query attention: one matrix for queries, keys and values, one for the output."""

    def __init__(self, build: BuildContext, prefix: str, window: int) -> None:
        config, names = build.config, build.names
        q = build.tensor.shard.of(config.num_heads).times(config.head_dim)
        kv = build.tensor.shard.heads(config.num_kv_heads).times(config.head_dim)
        self._qkv = build.linear(
            stacked(
                [f"{prefix}.{name}" for name in (names.q, names.k, names.v)],
                [q, kv, kv],
                config.hidden_size,
                config.qkv_bias,
            )
        )
        self._o = build.linear(stacked([f"{prefix}.{names.o}"], [config.hidden_size], q, config.o_bias))
        self.name = f"{prefix}.{names.k.rpartition('.')[0]}"
        """Name of the module in the checkpoint."""
        self._norm_names = (f"{prefix}.{names.q_norm}", f"{prefix}.{names.k_norm}")
        self.weights = _attention_weights(build, window)
        assert not isinstance(build.backend, MlaBackend), "selected for a model with latents"
        self._attend = build.backend.forward

    def forward(self, x: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; writes the step's keys and values into `kv`."""
        out = self._attend(self._qkv.forward(x), self.weights, kv, meta)
        return self._o.forward(out if rows is None else out[rows])

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {**self._qkv.weight_slots(), **self._o.weight_slots()}
        norms = (self.weights.q_norm, self.weights.k_norm)
        for name, weight in zip(self._norm_names, norms, strict=True):
            if weight is not None:
                slots[f"{name}.weight"] = copy_slot(weight)
        return slots


def _attention_weights(build: BuildContext, window: int) -> AttentionWeights:
    config = build.config

    def head_norm() -> torch.Tensor | None:
        return torch.empty(config.head_dim, dtype=build.dtype, device=build.device) if config.qk_norm else None

    return AttentionWeights(
        num_heads=build.tensor.shard.of(config.num_heads).size,
        num_kv_heads=build.tensor.shard.heads(config.num_kv_heads).size,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=window,
        soft_cap=0.0,
        cos_sin=build.cos_sin,
        q_norm=head_norm(),
        k_norm=head_norm(),
        norm_eps=config.rms_eps,
    )


class DecoderLayer:
    """Pre-norm attention and MLP, plain or with experts, around one residual stream."""

    def __init__(self, build: BuildContext, index: int) -> None:
        prefix = build.names.layer.format(index)
        self._input_norm = build.norm(f"{prefix}.{build.names.input_norm}")
        self.attention: Attention | LatentAttention
        if build.config.mla:
            self.attention = LatentAttention(build, prefix, build.config.mla)
        else:
            self.attention = Attention(build, prefix, build.config.windows[index])
        self._post_norm = build.norm(f"{prefix}.{build.names.post_norm}")
        moe = build.config.moe
        self._mlp = MoeBlock(build, moe, index, prefix) if moe and index in moe.layers else Mlp.plain(build, prefix)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual), both [T, hidden_size] -> the same of the next layer, whose first norm adds them up.

        With `rows` [R] only those tokens come out, [R, hidden_size].
        """
        x, residual = self._input_norm.forward(x, residual)
        x = self.attention.forward(x, kv, meta, rows)
        x, residual = self._post_norm.forward(x, residual if rows is None else residual[rows])
        if isinstance(self._mlp, Mlp):
            return self._mlp.forward(x), residual
        return self._mlp.forward(x, meta.slot_mapping if rows is None else meta.slot_mapping[rows]), residual

    @property
    def moe(self) -> MoeBlock | None:
        """The MLP, if it has experts."""
        return self._mlp if isinstance(self._mlp, MoeBlock) else None

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {
            **self._input_norm.weight_slots(),
            **self.attention.weight_slots(),
            **self._post_norm.weight_slots(),
            **self._mlp.weight_slots(),
        }
