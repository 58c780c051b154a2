"""Gated DeltaNet (arXiv 2412.06464): a layer whose memory of a sequence is a matrix of each head, in place of keys and values."""

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import LayerState
from starling_engine.kernels.state_replay import run_on_state
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.recurrent import recurrent_kernels
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.causal_convolution import delta_convolution
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, copy_slot, in_row_order, part_slot


class GatedDeltaNet:
    """One matrix for queries, keys, values and the gate of the output, a small one for the memory's gates, and one for the output.

    Queries, keys and values pass a short convolution. Ranks have some key heads each, with all of their value heads.
    """

    def __init__(self, build: BuildContext, prefix: str, delta: GatedDeltaConfig) -> None:
        names, hidden, shard = build.names.delta, build.config.hidden_size, build.tensor.shard
        self._delta, self._prefix, self._names = delta, prefix, names
        keys, values = shard.of(delta.key_heads), shard.of(delta.value_heads)
        k, v = keys.times(delta.key_dim), values.times(delta.value_dim)
        self._heads = values
        self._order: torch.Tensor | None = None
        self._gate_order: torch.Tensor | None = None
        if names.qkvz:
            per_key = delta.value_heads // delta.key_heads
            parts, gates = [delta.key_dim] * 2 + [per_key * delta.value_dim] * 2, [per_key] * 2
            self._in = self._linear(build, [names.qkvz], [keys.times(sum(parts))])
            self._gates = self._linear(build, [names.ba], [keys.times(sum(gates))], exact=True)
            self._order, self._gate_order = _parts_in_order(keys.size, parts), _parts_in_order(keys.size, gates)
        else:
            fused = f"{prefix}.{names.fused_qkv}"
            self._in = self._linear(build, [names.q, names.k, names.v, names.z], [k, k, v, v], fused=fused)
            self._gates = self._linear(build, [names.b, names.a], [values, values], exact=True)
        self._kernels = recurrent_kernels(build.dtype, build.device)
        self._conv = delta_convolution(build, prefix, delta, self._kernels)
        self._a_log, self._dt_bias = (torch.empty(values.size, device=build.device) for _ in range(2))
        self._norm = torch.empty(delta.value_dim, dtype=build.dtype, device=build.device)
        self._o = build.linear(stacked([f"{prefix}.{names.out}"], [hidden], v))

    def _linear(self, build: BuildContext, names: list[str], outs: list[Share], *, fused: str = "", exact: bool = False) -> Linear:
        """Makes a matrix; `fused` may hold the first three modules. Those that are `exact` are not quantized with the others."""
        modules = [f"{self._prefix}.{name}" for name in names]
        return build.linear(stacked(modules, outs, build.config.hidden_size, exact=exact, fused=fused, num_fused=3 if fused else 0))

    def forward(self, x: torch.Tensor, kv: LayerState, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; moves the state in `kv` on by the step's tokens.

        `kv` is the memory, then the last inputs of the convolution.
        """
        delta, heads = self._delta, self._heads.size
        memory, inputs = kv
        found = self._in.forward(x)
        b, a = torch.split(self._gates.forward(x), heads, dim=1)
        channels = self._conv.channels
        q, k, v = self._conv.forward(found[:, :channels], inputs, meta)
        out = run_on_state(
            lambda q, k, v, a, b, meta: self._kernels.gated_delta_rule(
                q, k, v, a, b, self._a_log, self._dt_bias, memory, meta, rate_scale=delta.rate_scale
            ),
            meta,
            _in_heads(q, delta.key_dim),
            _in_heads(k, delta.key_dim),
            _in_heads(v, delta.value_dim),
            a,
            b,
        )
        gate = _in_heads(found[:, channels:], delta.value_dim)
        if rows is not None:
            out, gate = out[rows], gate[rows]
        return self._o.forward(self._kernels.gated_rms_norm(out, gate, self._norm, delta.norm_eps).flatten(1))

    def weight_slots(self) -> dict[str, WeightSlot]:
        names, prefix = self._names, self._prefix
        own = {
            f"{prefix}.{names.a_log}": part_slot((self._heads,), self._a_log.copy_, element_bytes=4),
            f"{prefix}.{names.dt_bias}": part_slot((self._heads,), self._dt_bias.copy_, element_bytes=4),
            f"{prefix}.{names.norm}.weight": copy_slot(self._norm),
        }
        return {
            **_reordered(self._in.weight_slots(), self._order),
            **_reordered(self._gates.weight_slots(), self._gate_order),
            **self._conv.weight_slots(),
            **own,
            **self._o.weight_slots(),
        }


def _in_heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.view(len(x), x.shape[1] // dim, dim)


def _parts_in_order(heads: int, sizes: list[int]) -> torch.Tensor:
    """Returns the order [rows] int64 of rows that lie head by head, each with parts of these `sizes`: part by part."""
    rows = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, sizes, dim=1)])


def _reordered(slots: dict[str, WeightSlot], order: torch.Tensor | None) -> dict[str, WeightSlot]:
    return slots if order is None else {name: in_row_order(slot, order) for name, slot in slots.items()}
