"""Tables of cosines and sines for the rotary embedding, with every scaling that `model_config/rope.py` reads."""

import math

import torch

from starling_engine.model_config.rope import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def build_cos_sin(rope: RopeConfig, rotary_dim: int, max_position: int, device: torch.device) -> torch.Tensor:
    """Returns [max_position, rotary_dim] fp32 for half-split rotation: cosines in the first half, sines in the second."""
    frequencies, factor = rotary_frequencies(rope, rotary_dim)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    table = torch.empty(max_position, rotary_dim, dtype=torch.float32)
    torch.cos(angles, out=table[:, : rotary_dim // 2])
    torch.sin(angles, out=table[:, rotary_dim // 2 :])
    return table.mul_(factor).to(device)


def rotary_frequencies(rope: RopeConfig, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """Returns radians per position [rotary_dim / 2] fp32, and the factor of the table.

    Written in the order of transformers' operations: one rounding apart, angles at position 100,000 differ by 0.01.
    """
    periods = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain = 1.0 / periods
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(periods, scaling, rope.theta, rotary_dim), _yarn_attention_factor(scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scales by Llama 3.1's rule (meta-llama/llama-models, `apply_scaling`), on wavelengths in tokens."""
    wavelengths = 2 * math.pi / plain
    turns = scaling.original_max_position / wavelengths
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(turns < scaling.low_freq_factor, plain / scaling.factor, plain)
    medium = (turns >= scaling.low_freq_factor) & (turns <= scaling.high_freq_factor)
    return torch.where(medium, between, scaled)


def _yarn(periods: torch.Tensor, scaling: YarnScaling, theta: float, rotary_dim: int) -> torch.Tensor:
    """Scales by parts (arXiv 2309.00071, section 3.2): fast dimensions stay, slow ones are interpolated, with a ramp between."""

    def dimension_with_rotations(times: float) -> float:
        positions_per_radian = scaling.original_max_position / (times * 2 * math.pi)
        return rotary_dim * math.log(positions_per_radian) / (2 * math.log(theta))

    low, high = dimension_with_rotations(scaling.beta_fast), dimension_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # The reference's guard against a ramp of no width.
    width = high - low or 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def mscale_all_dim(rope: RopeConfig) -> float:
    """Returns the factor of queries, and of keys, where a latent model scales by YaRN; 1 for all others.

    This is "mscale" of all dimensions in DeepSeek-V2's formula. Rotated dimensions have their part of it in the table already.
    """
    match rope.scaling:
        case YarnScaling(factor=factor, mscale_all_dim=weight) if weight:
            return _mscale(factor, weight)
    return 1.0


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
