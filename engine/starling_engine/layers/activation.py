"""Activations by their names: of an MLP's gate, which is multiplied with up, or of up alone; and those of heads."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import elementwise_ops, encoder_ops, ops, reference
from starling_engine.native.reference import activate_and_mul
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
"""x, gate [T, C] -> [T, C]."""


def gate_mul(dtype: torch.dtype, device: torch.device, *, sigmoid: bool = False) -> Gate:
    """Returns a function for this dtype and device: x, gate [T, C] -> x * gate, or x * sigmoid(gate)."""
    if elementwise_kernels(dtype, device) == "native":
        return partial(ops.gate_mul, sigmoid=sigmoid)
    return (lambda x, gate: x * gate.sigmoid()) if sigmoid else torch.mul


def activation_of(name: str, dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the activation that a config calls `name`, for this dtype and device: x [T, C] -> [T, C]. It may overwrite x."""
    if name in elementwise_ops.ACTIVATIONS and encoder_ops.are_fastest(dtype, device):
        return partial(elementwise_ops.activate, name)
    return partial(activate, name)


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the activation of x that a config calls `name`, in torch. Heads alone have the last three."""
    return _ACTIVATIONS[name](x)


class Xielu:
    """xIELU (arXiv 2411.13010), whose slopes on both sides are learnt; `name` is its module in the checkpoint. In torch."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self._name = name
        self._p, self._n = (torch.empty(1, dtype=dtype, device=device) for _ in range(2))
        self._beta, self._eps = (torch.empty((), dtype=dtype, device=device) for _ in range(2))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # softplus(p) x^2 + beta x where x > 0, else (beta + softplus(n)) (exp(min(x, eps)) - 1 - x) + beta x
        alpha_p, alpha_n = F.softplus(self._p), self._beta + F.softplus(self._n)
        below = (torch.expm1(torch.minimum(x, self._eps)) - x).mul_(alpha_n)
        return torch.where(x > 0, alpha_p * x * x, below).add_(self._beta * x)

    def weight_slots(self) -> dict[str, WeightSlot]:
        parts = {"alpha_p": self._p, "alpha_n": self._n, "beta": self._beta, "eps": self._eps}
        return {f"{self._name}.{name}": copy_slot(tensor) for name, tensor in parts.items()}


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **reference.ACTIVATIONS,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
