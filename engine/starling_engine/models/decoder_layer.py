"""A decoder layer and its attention, built as the layer's description says.

Another kind of attention or MLP is another class with the same `forward` and `weight_slots`.
"""

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.mla_base import MlaBackend
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.linear import stacked
from starling_engine.layers.qk_norm import RotatedHeadNorm, WidthNorm
from starling_engine.layers.rope import halves_of_pairs
from starling_engine.model_config.layer import LayerConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.mla import LatentAttention
from starling_engine.models.mlp import Mlp
from starling_engine.models.moe_block import MoeBlock
from starling_engine.models.stream_border import StreamBorder
from starling_engine.weights.weight_slot import WeightSlot, copy_slot, in_row_order, part_copy_slot, plus_one_slot


class Attention:
    """Grouped-query attention: one matrix for queries, keys and values, one for the output."""

    def __init__(self, build: BuildContext, prefix: str, layer: LayerConfig) -> None:
        config, names, traits = build.config, build.names, build.config.traits
        q = build.tensor.shard.of(config.num_heads).times(config.head_dim)
        kv = build.tensor.shard.heads(config.num_kv_heads).times(config.head_dim)
        self._qkv = build.linear(
            stacked(
                [f"{prefix}.{name}" for name in (names.q, names.k, names.v)],
                [q, kv, kv],
                config.hidden_size,
                traits.qkv_bias,
                fused=f"{prefix}.{names.fused_qkv}",
            )
        )
        self._o = build.linear(stacked([f"{prefix}.{names.o}"], [config.hidden_size], q, traits.o_bias))
        self.name = f"{prefix}.{names.k.rpartition('.')[0]}"
        """Name of the module in the checkpoint."""
        self._norm_names = (f"{prefix}.{names.q_norm}", f"{prefix}.{names.k_norm}")
        self._sinks_name = f"{prefix}.{names.sinks}"
        self._heads = build.tensor.shard.of(config.num_heads)
        self._width_norm: WidthNorm | None = None
        if traits.qk_norm == "width":
            self._width_norm = WidthNorm(self._norm_names, (q, kv), config.rms_eps, build.tensor, build.device)
        self.weights = _attention_weights(build, layer)
        self._rotated_norm: RotatedHeadNorm | None = None
        if traits.qk_norm == "rotated head":
            heads = (self.weights.num_heads, self.weights.num_kv_heads)
            rotation = build.rotations[layer.rope]
            self._rotated_norm = RotatedHeadNorm(self._norm_names, heads, config.head_dim, rotation, config.rms_eps)
        self._plus_one = traits.norm == "one plus weight"
        self._pairs = 0
        """Elements of a head that lie in pairs in the checkpoint, and here as halves; 0: none do."""
        if traits.paired_rope and layer.rope is not None:
            self._pairs = config.rotary_dims[layer.rope]
        assert not isinstance(build.backend, MlaBackend), "selected for a model with latents"
        self._attend = build.backend.forward

    def forward(self, x: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; writes the step's keys and values into `kv`."""
        qkv = self._qkv.forward(x)
        if self._width_norm is not None:
            self._width_norm.forward(qkv)
        if self._rotated_norm is not None:
            self._rotated_norm.forward(qkv, meta.positions)
        out = self._attend(qkv, self.weights, kv, meta)
        return self._o.forward(_only(out, rows))

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {**self._qkv.weight_slots(), **self._o.weight_slots()}
        if self._pairs:
            rotated = tuple(f"{name}." for name in self._qkv.shape.names[:2])
            for name in [each for each in slots if each.startswith(rotated)]:
                order = halves_of_pairs(slots[name].local_shape[0], self.weights.head_dim, self._pairs)
                slots[name] = in_row_order(slots[name], order)
        if self._width_norm is not None:
            slots.update(self._width_norm.weight_slots())
        if self._rotated_norm is not None:
            slots.update(self._rotated_norm.weight_slots())
        norms = (self.weights.q_norm, self.weights.k_norm)
        for name, weight in zip(self._norm_names, norms, strict=True):
            if weight is not None:
                slots[f"{name}.weight"] = plus_one_slot(weight) if self._plus_one else copy_slot(weight)
        if self.weights.sinks is not None:
            slots[self._sinks_name] = part_copy_slot([self._heads], self.weights.sinks)
        return slots


def _attention_weights(build: BuildContext, layer: LayerConfig) -> AttentionWeights:
    config, traits = build.config, build.config.traits
    num_heads = build.tensor.shard.of(config.num_heads).size
    # Near 1, where 1 + weight is, numbers of 16 bits are too coarse.
    norm_dtype = torch.float32 if traits.norm == "one plus weight" else build.dtype

    def head_norm() -> torch.Tensor | None:
        return torch.empty(config.head_dim, dtype=norm_dtype, device=build.device) if traits.qk_norm == "head" else None

    return AttentionWeights(
        num_heads=num_heads,
        num_kv_heads=build.tensor.shard.heads(config.num_kv_heads).size,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if traits.attention_scale is None else traits.attention_scale,
        window=layer.window,
        soft_cap=traits.attention_cap,
        cos_sin=build.rotations[None if traits.qk_norm == "rotated head" else layer.rope],
        q_norm=head_norm(),
        k_norm=head_norm(),
        norm_eps=config.rms_eps,
        sinks=torch.empty(num_heads, dtype=torch.float32, device=build.device) if traits.attention_sinks else None,
    )


def _only(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x[rows]


class DecoderLayer:
    """Attention and MLP, plain or with experts, around one residual stream."""

    def __init__(self, build: BuildContext, index: int) -> None:
        config, names, layer = build.config, build.names, build.config.layers[index]
        prefix = names.layer.format(index)
        self.attention: Attention | LatentAttention
        if config.mla:
            self.attention = LatentAttention(build, prefix, config.mla)
        else:
            self.attention = Attention(build, prefix, layer)
        if layer.feed_forward == "experts":
            assert config.moe is not None, "a layer with experts that the model has not"
            self._mlp: MoeBlock | Mlp = MoeBlock(build, config.moe, index, prefix)
        else:
            self._mlp = Mlp.plain(build, prefix)
        before, after = layer.norms != "after", layer.norms in ("after", "both")
        self._attention_border = StreamBorder(
            build,
            f"{prefix}.{names.attention_norm}" if before else None,
            f"{prefix}.{names.attention_out_norm}" if after else None,
        )
        self._mlp_border: StreamBorder | None = None
        if layer.norms != "parallel":
            self._mlp_border = StreamBorder(
                build,
                f"{prefix}.{names.mlp_norm}" if before else None,
                f"{prefix}.{names.mlp_out_norm}" if after else None,
            )

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
        normed, residual = self._attention_border.enter(x, residual)
        attended = self._attention_border.leave(self.attention.forward(normed, kv, meta, rows))
        residual = _only(residual, rows)
        if self._mlp_border is None:
            return attended.add_(self._attention_border.leave(self._feed_forward(_only(normed, rows), meta, rows))), residual
        x, residual = self._mlp_border.enter(attended, residual)
        return self._mlp_border.leave(self._feed_forward(x, meta, rows)), residual

    def _feed_forward(self, x: torch.Tensor, meta: AttentionMetadata, rows: torch.Tensor | None) -> torch.Tensor:
        return self._mlp.forward(x) if isinstance(self._mlp, Mlp) else self._mlp.forward(x, _only(meta.slot_mapping, rows))

    @property
    def moe(self) -> MoeBlock | None:
        """The MLP, if it has experts."""
        return self._mlp if isinstance(self._mlp, MoeBlock) else None

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {
            **self._attention_border.weight_slots(),
            **self.attention.weight_slots(),
            **({} if self._mlp_border is None else self._mlp_border.weight_slots()),
            **self._mlp.weight_slots(),
        }
