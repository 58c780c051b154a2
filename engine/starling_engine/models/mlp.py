"""The plain MLP of a layer. Shared experts are one, too."""

from collections.abc import Callable
from functools import partial

import torch

from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.layers.activation import Xielu, activation_and_mul, activation_of
from starling_engine.layers.linear import stacked
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.moe import ExpertGate
from starling_engine.models.build_context import BuildContext
from starling_engine.native.reference import expert_gate
from starling_engine.parallel.rank_part import Rows, whole
from starling_engine.weights.weight_slot import WeightSlot, also_below

CACHED_ROWS = 512
"""Tokens that a CPU takes through the MLP at once, so that the values between its two matrices stay in the processor's cache.

The weights are not read more often: the matrix product reads them once for as many rows anyway.
"""


class Mlp:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix; `names` are the modules of the three.

    A checkpoint may have gate and up as one module, too, which is `fused`; `up_first` says in which order. Or it has all three
    below a module of another name, which is `other`. SiLU is a part of the product; others come after it.
    A gate may be `clamped`. Without one (`Traits.mlp_gate`) it is down(activation(up(x))). `activation` is the module of one with
    parameters.
    """

    def __init__(
        self,
        build: BuildContext,
        names: tuple[str, str, str],
        size: int,
        fused: str = "",
        activation: str = "",
        other: str = "",
        *,
        up_first: bool = False,
        clamped: ExpertGate | None = None,
    ) -> None:
        gate, up, down = names
        self._module, self._other = down.rpartition(".")[0], other
        config, share = build.config, build.tensor.shard.of(size)
        hidden, bias, act = config.hidden_size, config.traits.mlp_bias, config.hidden_act
        turned = build.names.transposed
        self._activate: Callable[[torch.Tensor], torch.Tensor]
        if config.traits.mlp_gate:
            gated = act == "silu" and config.traits.mlp_gate_scale == 1 and clamped is None
            shape = stacked([gate, up], [share, share], hidden, bias, gated=gated, fused=fused, fused_backwards=up_first)
            self._activate = _unchanged if shape.gated else activation_and_mul(act, build.dtype, build.device)
            if clamped is not None:
                self._activate = partial(expert_gate, gate=clamped)
        else:
            shape = stacked([up], [share], hidden, bias, transposed=turned)
            self._activate = (
                Xielu(activation, build.dtype, build.device) if act == "xielu" else activation_of(act, build.dtype, build.device)
            )
        self._in = build.linear(shape)
        self._arithmetic = build.arithmetic
        self._gates = share.size
        self._gate_scale, self._out_scale = config.traits.mlp_gate_scale, config.traits.mlp_out_scale
        down_bias = bias if config.traits.down_bias is None else config.traits.down_bias
        self._down = build.linear(stacked([down], [hidden], share, down_bias, transposed=turned))

    @classmethod
    def plain(cls, build: BuildContext, prefix: str, layer: LayerConfig) -> "Mlp":
        """Makes the MLP of a layer without experts."""
        names = build.names
        gate, up, down = (f"{prefix}.{name}" for name in (names.gate, names.up, names.down))
        fused, activation = (f"{prefix}.{name}" for name in (names.fused_gate_up, names.activation))
        size, other = layer.mlp_size or build.config.intermediate_size, f"{prefix}.{names.other_mlp}" if names.other_mlp else ""
        return cls(build, (gate, up, down), size, fused, activation, other, up_first=names.fused_up_first)

    @property
    def rounding(self) -> RowRounding | None:
        """The way to round rows before `forward`; None: there is none."""
        return self._in.rounding

    @property
    def fused_rows(self) -> int:
        """The most rows for `forward_fused`; 0 where there is none."""
        return min(self._in.fused_rows, self._down.fused_rows) if self._gate_scale == self._out_scale == 1 else 0

    def forward_fused(self, x: torch.Tensor, norm: RowNorm) -> torch.Tensor:
        """Adds `forward` of x's norm to x [T, hidden_size], in place, and returns it."""
        return self._down.forward_fused(self._activate(self._in.forward_fused(x, norm)), add_to=x)

    def forward(self, x: torch.Tensor | RoundedRows, adapters: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; `adapters` are those of its rows, as in `Linear.forward_adapted`."""
        return whole(self.forward_part(x, adapters))

    def forward_part(self, x: torch.Tensor | RoundedRows, adapters: torch.Tensor | None = None) -> Rows:
        """Does as `forward`, and leaves the sum to the caller, where ranks make one."""
        if isinstance(x, RoundedRows) or x.device.type != "cpu" or len(x) <= CACHED_ROWS:
            return self._forward(x, adapters)
        parts = [slice(at, at + CACHED_ROWS) for at in range(0, len(x), CACHED_ROWS)]
        return torch.cat([whole(self._forward(x[at], None if adapters is None else adapters[at])) for at in parts])

    def _forward(self, x: torch.Tensor | RoundedRows, adapters: torch.Tensor | None) -> Rows:
        rounding = self._down.rounding if self._in.gates_rounded else None
        if rounding is not None:
            out = self._down.forward_part(self._in.forward_gated(x, rounding))
        else:
            found = self._in.forward_adapted(x, adapters)
            if self._gate_scale != 1:
                self._arithmetic.multiply(found[:, : self._gates], self._gate_scale)
            out = self._down.forward_part(self._activate(found), adapters)
        return out if self._out_scale == 1 else self._arithmetic.multiply(whole(out), self._out_scale)

    def weight_slots(self) -> dict[str, WeightSlot]:
        own = self._activate.weight_slots() if isinstance(self._activate, Xielu) else {}
        slots = {**self._in.weight_slots(), **own, **self._down.weight_slots()}
        return also_below(slots, self._module, self._other) if self._other else slots


def _unchanged(product: torch.Tensor) -> torch.Tensor:
    return product
