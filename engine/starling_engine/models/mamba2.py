"""Mamba-2 (arXiv 2405.21060): a layer whose memory of a sequence is a matrix of each head, which forgets by a scalar a token."""

import torch
from torch.nn import functional as F

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import LayerState
from starling_engine.kernels.state_replay import run_on_state
from starling_engine.layers.activation import gate_mul
from starling_engine.layers.linear import stacked
from starling_engine.layers.recurrent import recurrent_kernels
from starling_engine.model_config.mamba2 import Mamba2Config
from starling_engine.models.build_context import BuildContext
from starling_engine.models.causal_convolution import CausalConvolution
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, part_slot

PARTS = ("gate", "x", "b", "c", "dt")
"""Parts of the first matrix's product. The checkpoint has them as one tensor; these names are ours."""


class Mamba2:
    """One matrix for gates, inputs, B, C and step sizes, and one for the output. Inputs, B and C pass a short convolution.

    Ranks have some heads each, and the groups of B and C that these need: several may have the same.
    """

    def __init__(self, build: BuildContext, prefix: str, mamba: Mamba2Config) -> None:
        names, hidden, shard = build.names.mamba2, build.config.hidden_size, build.tensor.shard
        self._mamba, self._names, self._prefix = mamba, names, prefix
        self._heads, groups = shard.of(mamba.heads), shard.heads(mamba.groups)
        width, keys = self._heads.times(mamba.head_dim), groups.times(mamba.state_size)
        self._width = width.size
        fused = f"{prefix}.{names.inputs}"
        modules = [f"{fused}.{part}" for part in PARTS]
        self._in = build.linear(stacked(modules, [width, width, keys, keys, self._heads], hidden, mamba.in_bias, fused=fused))
        self._kernels = recurrent_kernels(build.dtype, build.device)
        conv = f"{prefix}.{names.conv}"
        self._conv = CausalConvolution(
            [f"{conv}.{part}" for part in PARTS[1:-1]],
            [width, keys, keys],
            conv,
            mamba.kernel,
            self._kernels,
            build.device,
            bias=mamba.conv_bias,
        )
        self._a_log, self._skip, self._dt_bias = (torch.empty(self._heads.size, device=build.device) for _ in range(3))
        self._norm = None if mamba.norm == "none" else GroupNorm(build, f"{prefix}.{names.norm}", mamba, width, groups)
        self._o = build.linear(stacked([f"{prefix}.{names.out}"], [hidden], width, mamba.out_bias))
        self._scales: torch.Tensor | None = None
        if any(scale != 1 for scale in mamba.part_scales):
            sizes = torch.tensor([width.size, width.size, keys.size, keys.size, self._heads.size])
            self._scales = torch.tensor(mamba.part_scales).repeat_interleave(sizes).to(build.device, build.dtype)
        self._arithmetic = build.arithmetic
        self._scale = gate_mul(build.dtype, build.device)
        self._open = gate_mul(build.dtype, build.device, "silu")

    def forward(self, x: torch.Tensor, kv: LayerState, meta: AttentionMetadata, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; moves the state in `kv` on by the step's tokens.

        `kv` is the memory, then the last inputs of the convolution.
        """
        mamba, width = self._mamba, self._width
        memory, inputs = kv
        found = self._in.forward(x if mamba.in_scale == 1 else self._arithmetic.multiple(x, mamba.in_scale))
        if self._scales is not None:
            found = self._scale(found, self._scales.expand(len(found), -1))
        gate, mixed, dt = torch.split(found, [width, self._conv.channels, self._heads.size], dim=1)
        values, b, c = self._conv.forward(mixed, inputs, meta)
        out = run_on_state(
            lambda x, b, c, dt, meta: self._kernels.ssd_scan(
                x, b, c, dt, self._a_log, self._skip, self._dt_bias, memory, meta, dt_limits=mamba.dt_limits
            ),
            meta,
            values.view(len(x), -1, mamba.head_dim),
            b.view(len(x), -1, mamba.state_size),
            c.view(len(x), -1, mamba.state_size),
            dt,
        ).flatten(1)
        if rows is not None:
            out, gate = out[rows], gate[rows]
        result = self._o.forward(self._open(out, gate) if self._norm is None else self._norm.forward(out, gate))
        return result if mamba.out_scale == 1 else self._arithmetic.multiply(result, mamba.out_scale)

    def weight_slots(self) -> dict[str, WeightSlot]:
        names, prefix = self._names, self._prefix
        vectors = {names.a_log: self._a_log, names.skip: self._skip, names.dt_bias: self._dt_bias}
        return {
            **self._in.weight_slots(),
            **self._conv.weight_slots(),
            **{f"{prefix}.{name}": part_slot((self._heads,), each.copy_, element_bytes=4) for name, each in vectors.items()},
            **({} if self._norm is None else self._norm.weight_slots()),
            **self._o.weight_slots(),
        }


class GroupNorm:
    """Normalises each group of a Mamba-2 mixer's outputs, and opens them by the gate before that, or behind it.

    Where ranks share a group, they add its squares up.
    """

    def __init__(self, build: BuildContext, name: str, mamba: Mamba2Config, width: Share, groups: Share) -> None:
        self._name, self._width, self._groups = name, width, groups
        self._gate_first, self._eps = mamba.norm == "gate first", mamba.norm_eps
        self._weight = torch.empty(groups.size, width.size // groups.size, dtype=build.dtype, device=build.device)
        self._kernels = recurrent_kernels(build.dtype, build.device)
        self._ranks: Communicator | None = build.tensor if groups.whole < build.tensor.shard.count else None

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [T, width] -> [T, width]."""
        if self._ranks is not None:
            return self._over_ranks(x, gate, self._ranks)
        x, gate = (each.view(len(x), *self._weight.shape) for each in (x, gate))
        return self._kernels.gated_rms_norm(x, gate, self._weight, self._eps, gate_first=self._gate_first).flatten(1)

    def _over_ranks(self, x: torch.Tensor, gate: torch.Tensor, ranks: Communicator) -> torch.Tensor:
        """Does the same for this rank's part of its one group."""
        opened = F.silu(gate.float())
        wide = x * opened if self._gate_first else x.float()
        squares = torch.zeros(len(x), self._groups.whole, device=x.device)
        squares[:, self._groups.start] = wide.square().sum(1)
        mean = ranks.all_reduce(squares)[:, self._groups.start] / (self._width.whole // self._groups.whole)
        normal = self._weight[0] * (wide * torch.rsqrt(mean + self._eps)[:, None]).to(x.dtype)
        return normal if self._gate_first else (normal * opened).to(x.dtype)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {f"{self._name}.weight": part_slot((self._width,), self._weight.flatten().copy_)}
