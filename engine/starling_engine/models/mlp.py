"""The plain MLP of a layer. Shared experts are one, too."""

from collections.abc import Callable
from functools import partial

import torch

from starling_engine.layers.activation import activate, activate_and_mul
from starling_engine.layers.linear import stacked
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot

CACHED_ROWS = 512
"""Tokens that a CPU takes through the MLP at once, so that the values between its two matrices stay in the processor's cache.

The weights are not read more often: the matrix product reads them once for as many rows anyway.
"""


class Mlp:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix; `names` are the modules of the three.

    A checkpoint may have gate and up as one module, too, which is `fused`. SiLU is a part of the product; others come after it.
    Without a gate (`Traits.mlp_gate`) it is down(activation(up(x))).
    """

    def __init__(self, build: BuildContext, names: tuple[str, str, str], size: int, fused: str = "") -> None:
        gate, up, down = names
        config, share = build.config, build.tensor.shard.of(size)
        hidden, bias, act = config.hidden_size, config.traits.mlp_bias, config.hidden_act
        self._activate: Callable[[torch.Tensor], torch.Tensor]
        if config.traits.mlp_gate:
            shape = stacked([gate, up], [share, share], hidden, bias, gated=act == "silu", fused=fused)
            self._activate = _unchanged if shape.gated else partial(activate_and_mul, act)
        else:
            shape = stacked([up], [share], hidden, bias)
            self._activate = partial(activate, act)
        self._in = build.linear(shape)
        self._down = build.linear(stacked([down], [hidden], share, bias))

    @classmethod
    def plain(cls, build: BuildContext, prefix: str) -> "Mlp":
        """Makes the MLP of a layer without experts."""
        names = build.names
        gate, up, down = (f"{prefix}.{name}" for name in (names.gate, names.up, names.down))
        return cls(build, (gate, up, down), build.config.intermediate_size, f"{prefix}.{names.fused_gate_up}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        if x.device.type != "cpu" or len(x) <= CACHED_ROWS:
            return self._forward(x)
        return torch.cat([self._forward(x[at : at + CACHED_ROWS]) for at in range(0, len(x), CACHED_ROWS)])

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.forward(self._activate(self._in.forward(x)))

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {**self._in.weight_slots(), **self._down.weight_slots()}


def _unchanged(product: torch.Tensor) -> torch.Tensor:
    return product
