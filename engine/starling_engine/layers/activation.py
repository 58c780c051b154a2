"""Activations by their names: of an MLP's gate, which is multiplied with up, or of up alone; and those of heads."""

from collections.abc import Callable
from functools import partial

import torch

from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import elementwise_ops, encoder_ops, ops, reference
from starling_engine.native.reference import Opening, activate_and_mul
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


def silu_and_mul(dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function for this dtype and device: x [T, 2 * size], gate then up -> silu(gate) * up [T, size]."""
    match elementwise_kernels(dtype, device):
        case "triton":
            from starling_engine.kernels import activation

            return activation.silu_mul
        case "native":
            return partial(elementwise_ops.activate_and_mul, "silu")
    return partial(activate_and_mul, "silu")


def activation_and_mul(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the same with the activation that a config calls `name`."""
    if name == "silu":
        return silu_and_mul(dtype, device)
    kernels = elementwise_ops if encoder_ops.are_fastest(dtype, device) else reference
    return partial(kernels.activate_and_mul, name)


Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, C], gate [T, C], or [T, G] where each is for C / G columns -> [T, C]."""


def gate_mul(dtype: torch.dtype, device: torch.device, opening: Opening = "as it is") -> Gate:
    """Returns a function for this dtype and device: x [T, C], gate [T, G] -> x times the opened gate, as `ops.gate_mul`."""
    kernels = ops if elementwise_kernels(dtype, device) == "native" else reference
    return partial(kernels.gate_mul, opening=opening)


def activation_of(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the activation that a config calls `name`, for this dtype and device: x [T, C] -> [T, C]. It may overwrite x."""
    if name in elementwise_ops.ACTIVATIONS and encoder_ops.are_fastest(dtype, device):
        return partial(elementwise_ops.activate, name)
    return partial(activate, name)


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the activation of x that a config calls `name`, in torch. Heads alone have the last three."""
    return _ACTIVATIONS[name](x)


class Xielu:
    """xIELU (arXiv 2411.13010), whose slopes on both sides are learnt; `name` is its module in the checkpoint."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._p, self._n = (torch.empty(1, dtype=dtype, device=device) for _ in range(2))
        self._beta, self._eps = (torch.empty((), dtype=dtype, device=device) for _ in range(2))
        self._activate = elementwise_ops.xielu if encoder_ops.are_fastest(dtype, device) else reference.xielu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Takes x [T, C], and may overwrite it."""
        return self._activate(x, self._p, self._n, self._beta, self._eps)

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = {"alpha_p": self._p, "alpha_n": self._n, "beta": self._beta, "eps": self._eps}
        return {f"{self._name}.{name}": copy_slot(tensor) for name, tensor in parts.items()}


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **reference.ACTIVATIONS,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
