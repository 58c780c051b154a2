"""The gate of the MLP."""

import torch
from torch.nn import functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 * size], gate then up -> silu(gate) * up [T, size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
