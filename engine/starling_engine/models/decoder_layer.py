"""A decoder layer and its attention, built as the layer's description says.

Another kind of attention or MLP is another class with the same `forward` and `weight_slots`.
"""

from dataclasses import dataclass

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.compressed import CompressedAttention
from starling_engine.attention.mla_base import MlaBackend
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.kv_cache import LayerCache, ParallelCache
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.layers.activation import gate_mul
from starling_engine.layers.linear import stacked
from starling_engine.layers.qk_norm import RotatedHeadNorm, ValueNorm, WidthNorm
from starling_engine.layers.rope import halves_of_heads, halves_of_pairs
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.rope import ProportionalScaling
from starling_engine.models.build_context import BuildContext
from starling_engine.models.disentangled import DisentangledBias
from starling_engine.models.experts_beside_mlp import ExpertsBesideMlp
from starling_engine.models.gated_delta_net import GatedDeltaNet
from starling_engine.models.kimi_delta_attention import KimiDeltaAttention
from starling_engine.models.layer_end import LayerEnd
from starling_engine.models.mamba import Mamba
from starling_engine.models.mamba2 import Mamba2
from starling_engine.models.mla import LatentAttention
from starling_engine.models.mlp import Mlp
from starling_engine.models.moe_block import MoeBlock
from starling_engine.models.short_convolution import GatedShortConvolution
from starling_engine.models.stream_border import StreamBorder
from starling_engine.parallel.rank_part import Rows, added, whole
from starling_engine.weights.weight_slot import WeightSlot, copy_slot, in_row_order, part_copy_slot, plus_one_slot


class Attention:
    """Grouped-query attention: one matrix for queries, keys and values, one for the output."""

    def __init__(self, build: BuildContext, prefix: str, layer: LayerConfig) -> None:
        config, names, traits = build.config, build.names, build.config.traits
        own = config.heads_of(layer)
        q = build.tensor.shard.of(config.num_heads).times(own.dim)
        kv = build.tensor.shard.heads(own.count).times(own.dim)
        self._gates_heads = traits.attention_gate == "head"
        gates = build.tensor.shard.of(config.num_heads) if self._gates_heads else q
        self._gate_size = gates.size if traits.attention_gate else 0
        """Columns of the output's gates, which are here before all queries; in the checkpoint they may be behind each head's."""
        self._in_turn = names.q == names.k
        """Queries, key and value of each key-value head lie together in the checkpoint."""
        modules, sizes = [f"{prefix}.{name}" for name in (names.q, names.k, names.v)], [q, kv, kv]
        if layer.cache_of is not None:
            modules, sizes = modules[:1], sizes[:1]
        self._gate_in_turn = bool(self._gate_size) and not names.attention_gate
        if self._gate_in_turn:
            sizes[0] = q.times(2)
        elif self._gate_size:
            modules, sizes = [f"{prefix}.{names.attention_gate}", *modules], [gates, *sizes]
        self._queries = config.num_heads // own.count
        """Heads of queries beside each key-value head."""
        if self._in_turn:
            modules, sizes = modules[:1], [kv.times(self._queries + 2)]
        fused = f"{prefix}.{names.fused_qkv}"
        same, turned = layer.keys_are_values, names.transposed
        qkv = stacked(modules, sizes, config.hidden_size, traits.qkv_bias, fused=fused, repeats=same, transposed=turned)
        self._qkv = build.linear(qkv)
        self._o = build.linear(stacked([f"{prefix}.{names.o}"], [config.hidden_size], q, traits.o_bias, transposed=turned))
        self.name = f"{prefix}.{names.k.rpartition('.')[0]}"
        """Name of the module in the checkpoint."""
        self._rotated = (f"{prefix}.{names.q}.", f"{prefix}.{names.k}.")
        """Beginnings of the names of tensors whose rows are rotated."""
        self._norm_names = (f"{prefix}.{names.q_norm}", f"{prefix}.{names.k_norm}")
        self._sinks_name = f"{prefix}.{names.sinks}"
        self._heads = build.tensor.shard.of(config.num_heads)
        self._width_norm: WidthNorm | None = None
        if traits.qk_norm == "width":
            self._width_norm = WidthNorm(self._norm_names, (q, kv), config.rms_eps, build.tensor, build.dtype, build.device)
        self.weights = _attention_weights(build, layer)
        if build.distances is not None:
            self.weights.bias = DisentangledBias(build.distances, self._qkv.forward, own.dim, self.weights.scale)
        self._rotated_norm: RotatedHeadNorm | None = None
        if traits.qk_norm == "rotated head":
            heads = (self.weights.num_heads, self.weights.num_kv_heads)
            rotation = build.rotations[layer.rope]
            self._rotated_norm = RotatedHeadNorm(self._norm_names, heads, own.dim, rotation, config.rms_eps, build.dtype)
        self._arithmetic = build.arithmetic
        self._temperature = layer.temperature
        self._norm_weights = traits.qk_norm == "head"
        self._plus_one = traits.norm == "one plus weight"
        self._pairs = 0
        """Elements of a head that lie in pairs in the checkpoint, and here as halves; 0: none do."""
        if traits.paired_rope and layer.rope is not None:
            self._pairs = config.rotary_dims[layer.rope]
        self._halves = 0
        """Elements of a head that rotate with one half a head further in the checkpoint, and here as the first ones; 0: none do."""
        if layer.rope is not None and isinstance(config.ropes[layer.rope].scaling, ProportionalScaling):
            self._halves = config.rotary_dims[layer.rope]
        has_values = traits.value_norm and layer.cache_of is None
        self._value_norm = ValueNorm(kv.size, own.dim, config.rms_eps, build.dtype, build.device) if has_values else None
        assert not isinstance(build.backend, MlaBackend | CompressedAttention), "selected for another kind of model"
        self._attend = build.backend.forward
        self._open = gate_mul(build.dtype, build.device, "sigmoid")

    @property
    def rounding(self) -> RowRounding | None:
        """The way to round rows before `forward`; None: there is none."""
        return self._qkv.rounding

    def forward_part(
        self,
        x: torch.Tensor | RoundedRows,
        kv: torch.Tensor,
        meta: AttentionMetadata,
        rows: torch.Tensor | None = None,
        adapters: torch.Tensor | None = None,
    ) -> Rows:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; writes the step's keys and values into `kv`.

        `adapters` are those of all tokens, as in `Linear.forward_adapted`. The sum is left to the caller, where ranks make one.
        """
        out = self._attended(self._qkv.forward_adapted(x, adapters), kv, meta, rows)
        return self._o.forward_part(out, None if adapters is None else _only(adapters, rows))

    @property
    def fused_rows(self) -> int:
        """The most rows for `forward_fused`; 0 where there is none."""
        return min(self._qkv.fused_rows, self._o.fused_rows)

    def forward_fused(self, x: torch.Tensor, norm: RowNorm, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Adds what `forward_part` makes of x's norm to x [T, hidden_size], in place, and returns it."""
        return self._o.forward_fused(self._attended(self._qkv.forward_fused(x, norm), kv, meta, None), add_to=x)

    def _attended(self, qkv: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata, rows: torch.Tensor | None) -> torch.Tensor:
        """Returns the heads' results, of the tokens `rows` or of all, as the output's matrix takes them."""
        gate = None
        if self._gate_size:
            gate, qkv = qkv[:, : self._gate_size], qkv[:, self._gate_size :]
            if self._gates_heads and not qkv.is_cpu:  # so few columns leave heads where a GPU's kernels do not expect them
                qkv = qkv.contiguous()
        if self._width_norm is not None:
            self._width_norm.forward(qkv)
        if self._rotated_norm is not None:
            self._rotated_norm.forward(qkv, meta.positions)
        if self._temperature is not None:
            queries = qkv[:, : self._heads.size * self.weights.head_dim]
            self._arithmetic.temper(queries, meta.positions, self._temperature)
        if self._value_norm is not None:
            self._value_norm.forward(qkv)
        out = self._attend(qkv, self.weights, kv, meta)
        out = _only(out, rows)
        return out if gate is None else self._open(out, _only(gate, rows))

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {**self._qkv.weight_slots(), **self._o.weight_slots()}
        if self._pairs:
            for name in [each for each in slots if each.startswith(self._rotated)]:
                order = halves_of_pairs(slots[name].local_shape[0], self.weights.head_dim, self._pairs)
                slots[name] = in_row_order(slots[name], order)
        if self._halves:
            for name in [each for each in slots if each.startswith(self._rotated)]:
                order = halves_of_heads(slots[name].local_shape[0], self.weights.head_dim, self._halves)
                slots[name] = in_row_order(slots[name], order)
        if self._gate_in_turn:
            order = torch.arange(2 * self._gate_size).view(-1, 2, self.weights.head_dim).flip(1).transpose(0, 1)
            for name in [each for each in slots if each.startswith(f"{self._qkv.shape.names[0]}.")]:
                slots[name] = in_row_order(slots[name], order.flatten())
        if self._in_turn:
            rows = torch.arange(self._qkv.shape.out_size).view(-1, self._queries + 2, self.weights.head_dim)
            order = torch.cat([part.flatten() for part in torch.split(rows, [self._queries, 1, 1], dim=1)])
            for name in self._qkv.weight_slots():
                slots[name] = in_row_order(slots[name], order)
        if self._width_norm is not None:
            slots.update(self._width_norm.weight_slots())
        if self._rotated_norm is not None:
            slots.update(self._rotated_norm.weight_slots())
        norms = (self.weights.q_norm, self.weights.k_norm if self.weights.stores else None)
        for name, weight in zip(self._norm_names, norms, strict=True):
            if weight is not None and self._norm_weights:
                slot = plus_one_slot(weight) if self._plus_one else copy_slot(weight)
                order = halves_of_heads(len(weight), len(weight), self._halves)
                slots[f"{name}.weight"] = in_row_order(slot, order) if self._halves else slot
        if self.weights.sinks is not None:
            slots[self._sinks_name] = part_copy_slot([self._heads], self.weights.sinks)
        return slots


def _attention_weights(build: BuildContext, layer: LayerConfig) -> AttentionWeights:
    config, traits = build.config, build.config.traits
    own = config.heads_of(layer)
    num_heads = build.tensor.shard.of(config.num_heads).size
    # Near 1, where 1 + weight is, numbers of 16 bits are too coarse.
    norm_dtype = torch.float32 if traits.norm in ("one plus weight", "wide weight") else build.dtype

    table = None if traits.qk_norm == "rotated head" else layer.rope

    def head_norm() -> torch.Tensor | None:
        if traits.qk_norm == "head without weight":
            # It does not matter that this norm comes before the rotation, which keeps lengths.
            return None if layer.rope is None else torch.ones(own.dim, dtype=norm_dtype, device=build.device)
        return torch.empty(own.dim, dtype=norm_dtype, device=build.device) if traits.qk_norm == "head" else None

    q_norm = head_norm()
    return AttentionWeights(
        num_heads=num_heads,
        num_kv_heads=build.tensor.shard.heads(own.count).size,
        head_dim=own.dim,
        scale=own.dim**-0.5 if traits.attention_scale is None else traits.attention_scale,
        window=layer.window,
        soft_cap=traits.attention_cap,
        cos_sin=build.rotations[table],
        q_norm=q_norm,
        k_norm=head_norm() if layer.cache_of is None else q_norm,
        norm_eps=config.rms_eps,
        sinks=torch.empty(num_heads, dtype=torch.float32, device=build.device) if traits.attention_sinks else None,
        stores=layer.cache_of is None,
        rotates=table is not None,
        bias=None if build.distance_bias is None else build.distance_bias.of_scores,
    )


def _only(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x[rows]


Recurrent = GatedDeltaNet | KimiDeltaAttention | Mamba | Mamba2 | GatedShortConvolution
"""A mixer with a recurrent state."""
Mixing = Attention | LatentAttention | Recurrent


@dataclass(frozen=True, slots=True)
class FusedParts:
    """A layer for at most `rows` of the residual stream: norms, gates and sums are parts of the products beside them."""

    rows: int
    attention_norm: RowNorm
    attention: Attention
    mlp_norm: RowNorm
    mlp: Mlp

    def forward(self, x: torch.Tensor, kv: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """Takes the stream x [T, hidden_size] through the layer, in place, and returns it."""
        return self.mlp.forward_fused(self.attention.forward_fused(x, self.attention_norm, kv, meta), self.mlp_norm)


def _recurrent_mixer(build: BuildContext, prefix: str, layer: LayerConfig) -> Recurrent:
    config = build.config
    match layer.mixer:
        case "short convolution":
            assert config.short_conv is not None, "a layer with a convolution that the model has not"
            return GatedShortConvolution(build, prefix, config.short_conv)
        case "mamba":
            assert config.mamba is not None, "a layer with a state that the model has not"
            return Mamba(build, prefix, config.mamba)
        case "mamba2" | "attention and mamba2":
            assert config.mamba2 is not None, "a layer with a state that the model has not"
            return Mamba2(build, prefix, config.mamba2)
    assert config.gated_delta is not None, "a layer with a state that the model has not"
    make = KimiDeltaAttention if layer.mixer == "kimi delta attention" else GatedDeltaNet
    return make(build, prefix, config.gated_delta)


def _mixers(build: BuildContext, prefix: str, layer: LayerConfig) -> tuple[Mixing | None, Recurrent | None]:
    """Returns what a layer mixes tokens by, and what stands beside that."""
    mla = build.config.mla
    if layer.mixer == "none":
        return None, None
    recurrent = _recurrent_mixer(build, prefix, layer) if layer.has_state else None
    if not layer.attends:
        return recurrent, None
    if mla is None:
        return Attention(build, prefix, layer), recurrent
    return LatentAttention(build, prefix, mla, layer), recurrent


class DecoderLayer:
    """Attention, a recurrent mixer or both, and an MLP, plain or with experts, around one residual stream. One part may be missing.

    A recurrent mixer that stands beside attention is `beside`.
    """

    def __init__(self, build: BuildContext, index: int) -> None:
        config, names, layer = build.config, build.names, build.config.layers[index]
        prefix = names.layer.format(index)
        self.attention, self.beside = _mixers(build, prefix, layer)
        self._arithmetic = build.arithmetic
        self._in_scale, self._out_scale = config.traits.attention_in_scale, config.traits.attention_out_scale
        self._mlp: MoeBlock | Mlp | ExpertsBesideMlp | None = None
        if layer.feed_forward == "mlp and experts":
            assert config.moe is not None, "a layer with experts that the model has not"
            self._mlp = ExpertsBesideMlp(build, config.moe, index, prefix)
        elif layer.feed_forward == "experts":
            assert config.moe is not None, "a layer with experts that the model has not"
            self._mlp = MoeBlock(build, config.moe, index, prefix)
        elif layer.feed_forward == "mlp":
            self._mlp = Mlp.plain(build, prefix, layer)

        def border(norm: str, out_norm: str, *, before: bool) -> StreamBorder:
            after, of_sum = layer.norms in ("after", "both"), layer.norms == "sum"
            out_norm = f"{prefix}.{out_norm}"
            return StreamBorder(
                build, f"{prefix}.{norm}" if before else None, out_norm if after else None, out_norm if of_sum else None
            )

        before = layer.norms not in ("after", "sum")
        is_normed = layer.norms == "before feed-forward"
        self._attention_border: StreamBorder | None = None
        if self.attention is not None:
            self._attention_border = border(names.attention_norm, names.attention_out_norm, before=before and not is_normed)
        self._parallel = layer.norms == "parallel, each its own"
        self._mlp_border: StreamBorder | None = None
        if layer.norms != "parallel" and self._mlp is not None:
            self._mlp_border = border(names.mlp_norm, names.mlp_out_norm, before=before)
        self._end = LayerEnd(build, prefix) if config.traits.layer_scalar else None
        is_alone = self.beside is None and (self._mlp is None or self._mlp_border is not None)
        self._reads_norm = self.attention if isinstance(self.attention, Attention) and is_alone else None
        """Attention, where nothing else reads the first norm's result, which may be rounded for it then."""
        self._fused = self._fused_parts()

    def forward(
        self,
        x: Rows,
        residual: torch.Tensor | None,
        kv: LayerCache,
        meta: AttentionMetadata,
        rows: torch.Tensor | None = None,
        state: AttentionMetadata | None = None,
        adapters: torch.Tensor | None = None,
        layer_input: torch.Tensor | None = None,
    ) -> tuple[Rows, torch.Tensor | None]:
        """(x, residual), both [T, hidden_size] -> the same of the next layer, whose first norm adds them up.

        Without a residual x is the whole stream; with one it may be this rank's part of a sum. Both may be overwritten. With `rows`
        [R] only those tokens come out, [R, hidden_size]. `state` is as in `ForwardContext`, `adapters` as in
        `Linear.forward_adapted`, `layer_input` [T, size] what the layer gets beside the stream.
        """
        fused = self._fused if residual is None and rows is None and adapters is None else None
        if fused is not None and isinstance(x, torch.Tensor) and len(x) <= fused.rows:
            assert isinstance(kv, torch.Tensor), "a layer that attends has keys and values"
            return fused.forward(x, kv, meta), None
        first, border = self._attention_border, self._mlp_border
        if first is None:
            assert border is not None, "a layer has a mixer or a feed-forward part"
            x, residual = border.enter(x, residual)
            return border.close(border.leave(self._feed_forward(_only(x, rows), meta, rows)), _only(residual, rows))
        normed, residual = first.enter_rounded(x, residual, None if self._reads_norm is None else self._reads_norm.rounding)
        attended = first.leave(self._mix(normed, kv, meta, rows, state, adapters))
        adapters = None if adapters is None else _only(adapters, rows)
        residual = _only(residual, rows)
        if self._mlp is None:
            return first.close(attended, residual)
        if border is None:
            assert isinstance(normed, torch.Tensor), "both parts read the norm's result"
            out = first.leave(self._feed_forward(_only(normed, rows), meta, rows))
            return added(attended, out, self._arithmetic.add), residual
        rounding = self._mlp.rounding if isinstance(self._mlp, Mlp | ExpertsBesideMlp) else None
        if self._parallel:
            normed, residual = border.enter_rounded(residual, None, rounding)
            out = border.leave(self._feed_forward(normed, meta, rows))
            return added(attended, out, self._arithmetic.add), residual
        normed, residual = border.enter_rounded(*first.close(attended, residual), rounding)
        x, residual = border.close(border.leave(self._feed_forward(normed, meta, rows, adapters, residual)), residual)
        if self._end is None or residual is None:
            return x, residual
        total = self._arithmetic.add(residual, whole(x))
        return self._end.forward(total, None if layer_input is None else _only(layer_input, rows)), None

    def _fused_parts(self) -> "FusedParts | None":
        """Returns the layer for a few rows; None where it has other parts, or some that take launches of their own."""
        borders = (self._attention_border, self._mlp_border)
        norms = [norm for each in borders if each is not None and (norm := each.norm_alone) is not None]
        if self._reads_norm is None or self._end is not None or not isinstance(self._mlp, Mlp) or len(norms) < len(borders):
            return None
        rows = min(self._reads_norm.fused_rows, self._mlp.fused_rows)
        return FusedParts(rows, norms[0], self._reads_norm, norms[1], self._mlp) if rows else None

    def _mix(
        self,
        x: torch.Tensor | RoundedRows,
        kv: LayerCache,
        meta: AttentionMetadata,
        rows: torch.Tensor | None,
        state: AttentionMetadata | None,
        adapters: torch.Tensor | None,
    ) -> Rows:
        mixer = self.attention
        if isinstance(mixer, Recurrent):
            assert isinstance(kv, tuple) and isinstance(x, torch.Tensor), "a layer with a state has rows of it"
            return mixer.forward(x, kv, meta, rows)
        assert mixer is not None, "a layer without a mixer mixes nothing"
        if self.beside is None:
            assert isinstance(kv, torch.Tensor), "a layer that attends has keys and values"
            if isinstance(mixer, Attention):
                return mixer.forward_part(x, kv, meta, rows, adapters)
            assert isinstance(x, torch.Tensor), "rows are rounded for what takes no such"
            return mixer.forward_part(x, kv, meta, rows)
        assert isinstance(kv, ParallelCache) and state is not None, "both mixers have a cache"
        assert isinstance(x, torch.Tensor), "both mixers read the norm's result"
        found = self.beside.forward(x, kv.state, state, rows)
        scaled = x if self._in_scale == 1 else self._arithmetic.multiple(x, self._in_scale)
        attended = mixer.forward_part(scaled, kv.kv, meta, rows)
        return self._arithmetic.add(found, whole(attended), self._out_scale)

    def _feed_forward(
        self,
        x: torch.Tensor | RoundedRows,
        meta: AttentionMetadata,
        rows: torch.Tensor | None,
        adapters: torch.Tensor | None = None,
        stream: torch.Tensor | None = None,
    ) -> Rows:
        if isinstance(self._mlp, Mlp):
            return self._mlp.forward_part(x, adapters)
        if isinstance(self._mlp, ExpertsBesideMlp):
            assert stream is not None, "experts beside an MLP read the stream"
            return self._mlp.forward(x, stream, _only(meta.slot_mapping, rows))
        assert self._mlp is not None and isinstance(x, torch.Tensor), "a layer without a feed-forward part"
        return self._mlp.forward_part(x, _only(meta.slot_mapping, rows))

    @property
    def mixers(self) -> tuple["Mixing", ...]:
        """The parts that mix tokens."""
        return tuple(mixer for mixer in (self.attention, self.beside) if mixer is not None)

    @property
    def moe(self) -> MoeBlock | None:
        """The MLP, if it has experts."""
        return self._mlp.moe if isinstance(self._mlp, ExpertsBesideMlp) else self._mlp if isinstance(self._mlp, MoeBlock) else None

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = (self._attention_border, *self.mixers, self._mlp_border, self._mlp, self._end)
        return {name: slot for part in parts if part is not None for name, slot in part.weight_slots().items()}
