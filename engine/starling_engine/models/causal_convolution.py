"""The short convolution before a recurrent layer. It has some parts, which a checkpoint may have as one tensor."""

from collections.abc import Callable, Sequence

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.recurrent_state import StateRows
from starling_engine.kernels.state_replay import run_on_state
from starling_engine.layers.recurrent import RecurrentKernels
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.models.build_context import BuildContext
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import Alias, WeightSlot, part_slot


class CausalConvolution:
    """Convolves each channel with its last inputs, and takes SiLU of that, unless not `silu`.

    `modules` are the parts' names, `shares` the channels of each that this rank has, `fused` the module that may hold all of them.
    """

    def __init__(
        self,
        modules: Sequence[str],
        shares: Sequence[Share],
        fused: str | None,
        kernel: int,
        kernels: RecurrentKernels,
        device: torch.device,
        *,
        bias: bool = False,
        silu: bool = True,
    ) -> None:
        self._modules, self._shares, self._fused = modules, shares, fused
        self.sizes = [share.size for share in shares]
        """Channels of each part here."""
        self._weight = torch.empty(kernel, sum(self.sizes), device=device)
        self._bias = torch.empty(sum(self.sizes), device=device) if bias else None
        self._kernels, self._silu = kernels, silu

    @property
    def channels(self) -> int:
        return self._weight.shape[1]

    def forward(self, x: torch.Tensor, state: StateRows, meta: AttentionMetadata) -> list[torch.Tensor]:
        """x [T, channels] -> the parts; moves the state on by the step's tokens."""
        mixed = run_on_state(
            lambda x, meta: self._kernels.short_convolution(x, self._weight, self._bias, state, meta, silu=self._silu), meta, x
        )
        return list(torch.split(mixed, self.sizes, dim=1))

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Returns the slots of weights [channels, 1, kernel] and of biases, both in fp32."""
        kernel, channels = len(self._weight), sum(share.whole for share in self._shares)
        rest = (Share.all(1), Share.all(kernel))
        weights = torch.split(self._weight, self.sizes, dim=1)
        biases = [None] * len(self.sizes) if self._bias is None else torch.split(self._bias, self.sizes)
        slots, before = {}, 0
        for module, share, weight, bias in zip(self._modules, self._shares, weights, biases, strict=True):
            index = slice(before + share.start, before + share.start + share.size)
            alias = Alias((f"{self._fused}.weight",), (channels, 1, kernel), (index,)) if self._fused else None
            slots[f"{module}.weight"] = part_slot((share, *rest), _load_taps(weight), alias, element_bytes=4)
            if bias is not None:
                alias = Alias((f"{self._fused}.bias",), (channels,), (index,)) if self._fused else None
                slots[f"{module}.bias"] = part_slot((share,), bias.copy_, alias, element_bytes=4)
            before += share.whole
        return slots


def delta_convolution(build: BuildContext, prefix: str, delta: GatedDeltaConfig, kernels: RecurrentKernels) -> CausalConvolution:
    """Returns what queries, keys and values pass in layers of Gated DeltaNet and of Kimi Delta Attention."""
    names, shard = build.names.delta, build.tensor.shard
    keys = shard.of(delta.key_heads).times(delta.key_dim)
    shares = [keys, keys, shard.of(delta.value_heads).times(delta.value_dim)]
    modules = [f"{prefix}.{name}" for name in (names.q_conv, names.k_conv, names.v_conv)]
    return CausalConvolution(modules, shares, f"{prefix}.{names.fused_conv}", delta.kernel, kernels, build.device)


def _load_taps(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Returns what copies taps [channels, 1, kernel] to `target` [kernel, channels]."""
    return lambda tensor: target.copy_(tensor[:, 0].T)
