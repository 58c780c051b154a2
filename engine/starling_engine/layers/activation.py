"""Activations of an MLP: of its gate, which is multiplied with up, or of up alone."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import ops


def silu_and_mul(dtype: torch.dtype, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function for this dtype and device: x [T, 2 * size], gate then up -> silu(gate) * up [T, size]."""
    match elementwise_kernels(dtype, device):
        case "triton":
            from starling_engine.kernels import activation

            return activation.silu_mul
        case "native":
            return ops.silu_mul
    return partial(activate_and_mul, "silu")


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Returns the activation of x that a config calls `name`, in torch."""
    return _ACTIVATIONS[name](x)


def activate_and_mul(name: str, x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * size], gate then up -> activation(gate) * up [T, size], in torch."""
    gate, up = x.chunk(2, dim=-1)
    return activate(name, gate).mul_(up)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square_()


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": _squared_relu,
}
