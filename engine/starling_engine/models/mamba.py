"""Mamba (arXiv 2312.00752): a layer whose memory of a sequence is a vector of each channel, all of whose elements forget alone."""

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import LayerState
from starling_engine.kernels.state_replay import run_on_state
from starling_engine.layers.linear import stacked
from starling_engine.layers.qk_norm import ValueNorm
from starling_engine.layers.recurrent import recurrent_kernels
from starling_engine.model_config.mamba import MambaConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.models.causal_convolution import CausalConvolution
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, part_slot


class Mamba:
    """One matrix for inputs and gates, and one for the output. Inputs pass a short convolution.

    B, C and what step sizes are made of come from all channels together, and are whole on every rank. Ranks have some channels.
    """

    def __init__(self, build: BuildContext, prefix: str, mamba: MambaConfig) -> None:
        names, hidden = build.names.mamba, build.config.hidden_size
        self._mamba, self._prefix, self._names = mamba, prefix, names
        self._share = share = build.tensor.shard.of(mamba.channels)

        def named(module: str) -> str:
            return f"{prefix}.{module}"

        parts = [named(f"{names.inputs}.{part}") for part in ("x", "gate")]  # these names are ours
        self._in = build.linear(stacked(parts, [share, share], hidden, mamba.bias, fused=named(names.inputs)))
        self._kernels = recurrent_kernels(build.dtype, build.device)
        self._conv = CausalConvolution(
            [named(names.conv)], [share], None, mamba.kernel, self._kernels, build.device, bias=mamba.conv_bias
        )
        self._made = build.linear(stacked([named(names.made)], [sum(mamba.made)], share))
        self._norms = InnerNorm.of(build, prefix, mamba)
        self._steps = build.linear(stacked([named(names.steps)], [share], mamba.rank))
        self._rates = torch.empty(mamba.state_size, share.size, device=build.device)
        self._skip, self._dt_bias = (torch.empty(share.size, device=build.device) for _ in range(2))
        self._o = build.linear(stacked([named(names.out)], [hidden], share, mamba.bias))

    def forward(self, x: torch.Tensor, kv: LayerState, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; moves the state in `kv` on by the step's tokens.

        `kv` is the memory, then the last inputs of the convolution.
        """
        memory, inputs = kv
        mixed, gate = self._in.forward(x).chunk(2, dim=1)
        (values,) = self._conv.forward(mixed, inputs, meta)
        made = list(torch.split(self._made.forward(values), list(self._mamba.made), dim=1))
        if self._norms:
            made = [norm.forward(part) for norm, part in zip(self._norms, made, strict=True)]
        steps, b, c = made
        dt = self._steps.forward(steps.contiguous())
        out = run_on_state(
            lambda x, gate, dt, b, c, meta: self._kernels.selective_scan(
                x, gate, dt, b, c, self._rates, self._skip, self._dt_bias, memory, meta
            ),
            meta,
            values,
            gate,
            dt,
            b,
            c,
        )
        return self._o.forward(out if rows is None else out[rows])

    def weight_slots(self) -> dict[str, WeightSlot]:
        names, prefix, share = self._names, self._prefix, self._share
        vectors = {names.skip: self._skip, f"{names.steps}.bias": self._dt_bias}
        rates = part_slot((share, Share.all(self._mamba.state_size)), self._load_rates, element_bytes=4)
        return {
            **self._in.weight_slots(),
            **self._conv.weight_slots(),
            **self._made.weight_slots(),
            **{name: slot for norm in self._norms for name, slot in norm.weight_slots().items()},
            **self._steps.weight_slots(),
            f"{prefix}.{names.a_log}": rates,
            **{f"{prefix}.{name}": part_slot((share,), each.copy_, element_bytes=4) for name, each in vectors.items()},
            **self._o.weight_slots(),
        }

    def _load_rates(self, logarithms: torch.Tensor) -> None:
        """Takes logarithms [channels, state_size] of the rates at which elements decay."""
        self._rates.copy_(logarithms.T).exp_()


class InnerNorm:
    """RMSNorm of one of the vectors that inputs are made into. Without weights it has no tensor in the checkpoint."""

    def __init__(self, build: BuildContext, name: str, size: int, mamba: MambaConfig) -> None:
        self._norm = build.norm(name, size, mamba.norm_eps) if mamba.norms == "weights" else None
        self._alone = ValueNorm(size, size, mamba.norm_eps, build.dtype, build.device)

    @classmethod
    def of(cls, build: BuildContext, prefix: str, mamba: MambaConfig) -> list["InnerNorm"]:
        """Returns those of all three vectors; none where the model has none."""
        if mamba.norms == "none":
            return []
        names = [f"{prefix}.{name}" for name in build.names.mamba.norms]
        return [cls(build, name, size, mamba) for name, size in zip(names, mamba.made, strict=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, size], without gaps. May overwrite x."""
        x = x.contiguous()
        if self._norm is not None:
            return self._norm.forward(x, None)[0]
        self._alone.forward(x)
        return x

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {} if self._norm is None else self._norm.weight_slots()
