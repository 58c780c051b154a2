"""A gated short convolution (LFM2, arXiv 2511.23404): a layer that remembers of a sequence its last inputs alone."""

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import LayerState
from starling_engine.layers.activation import gate_mul
from starling_engine.layers.linear import stacked
from starling_engine.layers.recurrent import recurrent_kernels
from starling_engine.model_config.short_conv import ShortConvConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.causal_convolution import CausalConvolution
from starling_engine.weights.weight_slot import WeightSlot


class GatedShortConvolution:
    """One matrix for the input and two gates, and one for the output. A gate multiplies the convolution's input, one its output.

    Ranks have some channels each.
    """

    def __init__(self, build: BuildContext, prefix: str, conv: ShortConvConfig) -> None:
        names, hidden = build.names.short_conv, build.config.hidden_size
        share = build.tensor.shard.of(conv.channels)
        parts = [f"{prefix}.{name}" for name in (names.in_gate, names.out_gate, names.x)]
        self._in = build.linear(stacked(parts, [share] * 3, hidden, conv.bias, fused=f"{prefix}.{names.fused_in}"))
        kernels = recurrent_kernels(build.dtype, build.device)
        self._conv = CausalConvolution(
            [f"{prefix}.{names.conv}"], [share], None, conv.kernel, kernels, build.device, bias=conv.bias, silu=False
        )
        self._gated = gate_mul(build.dtype, build.device)
        self._o = build.linear(stacked([f"{prefix}.{names.out}"], [hidden], share, conv.bias))

    def forward(self, x: torch.Tensor, kv: LayerState, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; moves the state in `kv` on by the step's tokens.

        `kv` is the last inputs of the convolution.
        """
        (inputs,) = kv
        in_gate, out_gate, values = self._in.forward(x).chunk(3, dim=1)
        (out,) = self._conv.forward(self._gated(values, in_gate), inputs, meta)
        if rows is not None:
            out, out_gate = out[rows], out_gate[rows]
        return self._o.forward(self._gated(out, out_gate))

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {**self._in.weight_slots(), **self._conv.weight_slots(), **self._o.weight_slots()}
