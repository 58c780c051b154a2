"""Kimi Delta Attention (arXiv 2510.26692): a Gated DeltaNet in which each channel of a key has a decay of its own."""

from functools import partial

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import LayerState
from starling_engine.kernels.state_replay import run_on_state
from starling_engine.layers.linear import stacked
from starling_engine.layers.recurrent import recurrent_kernels
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.causal_convolution import delta_convolution
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, copy_slot, part_slot


class KimiDeltaAttention:
    """One matrix for queries, keys and values, which pass a short convolution, and one for the output.

    Decays and gates of the output come through a narrow matrix each, whole on every rank, and a wide one. Ranks have some heads.
    """

    def __init__(self, build: BuildContext, prefix: str, delta: GatedDeltaConfig) -> None:
        names, hidden, shard = build.names.delta, build.config.hidden_size, build.tensor.shard
        self._delta, self._prefix, self._names = delta, prefix, names
        keys, values = shard.of(delta.key_heads), shard.of(delta.value_heads)
        k, v, rank = keys.times(delta.key_dim), values.times(delta.value_dim), delta.gate_rank

        def named(*modules: str) -> list[str]:
            return [f"{prefix}.{module}" for module in modules]

        self._qkv = build.linear(stacked(named(names.q, names.k, names.v), [k, k, v], hidden))
        self._narrow = build.linear(stacked(named(names.decay_in, names.gate_in), [rank, rank], hidden))
        self._decays = build.linear(stacked(named(names.decay_out), [k], rank))
        self._gates = build.linear(stacked(named(names.gate_out), [v], rank))
        self._rates = build.linear(stacked(named(names.b), [values], hidden, exact=True))
        self._o = build.linear(stacked(named(names.out), [hidden], v))
        self._kernels = recurrent_kernels(build.dtype, build.device)
        self._conv = delta_convolution(build, prefix, delta, self._kernels)
        self._heads = keys
        self._a_log = torch.empty(keys.size, device=build.device)
        self._dt_bias = torch.empty(keys.size, delta.key_dim, device=build.device)
        self._norm = torch.empty(delta.value_dim, dtype=build.dtype, device=build.device)

    def forward(self, x: torch.Tensor, kv: LayerState, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; moves the state in `kv` on by the step's tokens.

        `kv` is the memory, then the last inputs of the convolution.
        """
        delta, heads = self._delta, self._heads.size
        memory, inputs = kv
        mixed = self._conv.forward(self._qkv.forward(x), inputs, meta)
        q, k, v = (part.view(len(x), heads, part.shape[1] // heads) for part in mixed)
        for_decays, for_gates = self._narrow.forward(x).chunk(2, dim=1)
        decays = self._decays.forward(for_decays).view(len(x), heads, delta.key_dim)
        b = self._rates.forward(x)
        out = run_on_state(
            lambda q, k, v, decays, b, meta: self._kernels.gated_delta_rule(
                q, k, v, decays, b, self._a_log, self._dt_bias, memory, meta
            ),
            meta,
            q,
            k,
            v,
            decays,
            b,
        )
        if rows is not None:
            out, for_gates = out[rows], for_gates[rows]
        gate = self._gates.forward(for_gates).view(len(out), heads, delta.value_dim)
        return self._o.forward(self._kernels.gated_rms_norm(out, gate, self._norm, delta.norm_eps, sigmoid=True).flatten(1))

    def weight_slots(self) -> dict[str, WeightSlot]:
        names, prefix, one = self._names, self._prefix, Share.all(1)

        def load(target: torch.Tensor, tensor: torch.Tensor) -> None:
            target.copy_(tensor.reshape(target.shape))

        own = {
            f"{prefix}.{names.a_log}": part_slot((one, one, self._heads, one), partial(load, self._a_log), element_bytes=4),
            f"{prefix}.{names.dt_bias}": part_slot(
                (self._heads.times(self._delta.key_dim),), partial(load, self._dt_bias), element_bytes=4
            ),
            f"{prefix}.{names.norm}.weight": copy_slot(self._norm),
        }
        matrices = (self._qkv, self._narrow, self._decays, self._gates, self._rates)
        slots = {name: slot for matrix in matrices for name, slot in matrix.weight_slots().items()}
        return {**slots, **self._conv.weight_slots(), **own, **self._o.weight_slots()}
