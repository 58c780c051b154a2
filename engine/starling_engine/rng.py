"""Counter-based noise for sampling: a token's noise depends on seed, position and token alone.

A request draws the same tokens however it is batched, preempted or moved. The hash is SplitMix64's
finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

import torch
from torch import Tensor

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(constant: int) -> int:
    """Returns the int64 with the bits of a 64-bit constant: torch's arithmetic on int64 wraps around."""
    return constant - (1 << 64) if constant >> 63 else constant


_GOLDEN, _MIX_1, _MIX_2 = _signed(GOLDEN), _signed(MIX_1), _signed(MIX_2)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifts logically to the right; torch's own shift carries the sign down."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Returns standard Gumbel noise [S, vocab] float64 for seed [S] and position [S], both int64."""
    key = _mix(seed + _GOLDEN * (position + 1))
    token = torch.arange(1, vocab + 1, dtype=torch.int64, device=seed.device)
    random = _mix(key[:, None] + _GOLDEN * token)
    uniform = (_shifted(random, 11).double() + 0.5) / 2.0**53
    return -torch.log(-torch.log(uniform))
