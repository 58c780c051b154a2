"""The activation of a gated MLP: SiLU or GELU of the gate, times up."""

from collections.abc import Callable

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
    return _silu_and_mul


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * size], gate then up -> gelu(gate) * up [T, size], by GELU's approximation with tanh, in torch."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
