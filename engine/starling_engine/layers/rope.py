"""Tables of cosines and sines for the rotary embedding, with every scaling that `model_config/rope.py` reads."""

import math
from collections.abc import Mapping

import torch

from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NtkScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)

Rotations = Mapping[int | None, torch.Tensor]
"""Tables by the index of their rotary embedding (`LayerConfig.rope`). None's is of layers that rotate nothing."""


def build_rotations(config: ModelConfig, max_position: int, device: torch.device) -> Rotations:
    """Returns the table of each rotary embedding that a layer of the model names."""
    return {
        at: no_rotation(max_position, device)
        if at is None
        else build_cos_sin(config.ropes[at], config.rotary_dims[at], max_position, device)
        for at in config.named_ropes
    }


def no_rotation(max_position: int, device: torch.device) -> torch.Tensor:
    """Returns a table [max_position, 2] that leaves all elements as they are: kernels turn the first two by an angle of 0."""
    return torch.tensor([1.0, 0.0], device=device).repeat(max_position, 1)


def build_cos_sin(rope: RopeConfig, rotary_dim: int, max_position: int, device: torch.device) -> torch.Tensor:
    """Returns [max_position, rotary_dim] fp32 for half-split rotation: cosines in the first half, sines in the second."""
    inv_freq, attention_factor = rotary_inv_freq(rope, rotary_dim, max_position)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    table = torch.empty(max_position, rotary_dim, dtype=torch.float32)
    torch.cos(angles, out=table[:, : rotary_dim // 2])
    torch.sin(angles, out=table[:, rotary_dim // 2 :])
    return table.mul_(attention_factor).to(device)


def halves_of_pairs(rows: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Returns the order [rows] int64 in which rows of heads whose first `rotary_dim` rotate in pairs are those of halves."""
    heads = torch.arange(rows).view(-1, head_dim)
    pairs = heads[:, :rotary_dim].view(len(heads), -1, 2).transpose(1, 2).flatten(1)
    return torch.cat([pairs, heads[:, rotary_dim:]], dim=1).flatten()


def halves_of_heads(rows: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Returns the order [rows] int64 in which those elements of heads come first that rotate with one half a head further.

    There are `rotary_dim` of them: the first ones of each half.
    """
    halves = torch.arange(rows).view(-1, 2, head_dim // 2)
    rotated, rest = halves[..., : rotary_dim // 2], halves[..., rotary_dim // 2 :]
    return torch.cat([rotated.flatten(1), rest.flatten(1)], dim=1).flatten()


def rotary_inv_freq(rope: RopeConfig, rotary_dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    """Returns inv_freq [rotary_dim / 2] fp32, radians per position, and the attention factor, which scales cosines and sines.

    Operations come in transformers' order. In another order a frequency may round differently, and then its angle at position
    100,000 differs by 0.01.
    """
    pos_freqs = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    inv_freq = 1.0 / pos_freqs
    match rope.scaling:
        case None:
            return inv_freq, 1.0
        case LinearScaling(factor=factor):
            return inv_freq / factor, 1.0
        case NtkScaling(factor=factor):
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            return 1.0 / (rope.theta * factor) ** exponents / factor ** (2 / rotary_dim), 1.0
        case ProportionalScaling(factor=factor):
            return 1.0 / rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rope.head_dim) / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(inv_freq, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(pos_freqs, scaling, rope.theta, rotary_dim), _yarn_attention_factor(scaling)
        case LongRopeScaling() as scaling:
            return 1.0 / (torch.tensor(scaling.factors(max_position)) * pos_freqs), scaling.attention_factor


def _llama3(inv_freq: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scales by Llama 3.1's rule (meta-llama/llama-models, `apply_scaling`), by the rotations within the original context."""
    wavelengths = 2 * math.pi / inv_freq
    rotations = scaling.original_max_position / wavelengths
    smooth = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smoothed = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = torch.where(rotations < scaling.low_freq_factor, inv_freq / scaling.factor, inv_freq)
    medium = (rotations >= scaling.low_freq_factor) & (rotations <= scaling.high_freq_factor)
    return torch.where(medium, smoothed, scaled)


def _yarn(pos_freqs: torch.Tensor, scaling: YarnScaling, theta: float, rotary_dim: int) -> torch.Tensor:
    """Scales by parts (arXiv 2309.00071, section 3.2): fast dimensions stay, slow ones are interpolated, with a ramp between."""

    def dimension_with_rotations(num_rotations: float) -> float:
        positions_per_radian = scaling.original_max_position / (num_rotations * 2 * math.pi)
        return rotary_dim * math.log(positions_per_radian) / (2 * math.log(theta))

    low, high = dimension_with_rotations(scaling.beta_fast), dimension_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # Transformers' guard against a ramp of width 0.
    width = high - low or 0.001
    extrapolated = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * pos_freqs) * (1 - extrapolated) + 1.0 / pos_freqs * extrapolated


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        usual = _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    else:
        usual = _mscale(scaling.factor, 1.0)
    return scaling.attn_factor * usual


def mscale_all_dim(rope: RopeConfig) -> float:
    """Returns what an MLA model with YaRN multiplies queries by, and keys as well: DeepSeek-V2's mscale_all_dim. 1 for all others.

    It is for all dimensions of a head. The table has the attention factor, which is for rotated dimensions alone.
    """
    match rope.scaling:
        case YarnScaling(factor=factor, mscale_all_dim=mscale) if mscale:
            return _mscale(factor, mscale)
    return 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
