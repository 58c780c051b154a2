"""Keys and values as a cache holds them: numbers, float8_e4m3fn (arXiv 2209.05433), or rows of codes with their scales.

A row is what one head caches of a token: its keys, or its values. The tensor's dtype says its form.

int8   D codes of 8 bits with a sign, and a float16 scale for each 32 columns: 8.5 bits a number (llama.cpp's Q8_0)
uint8  D codes of 4 bits, two in a byte, of 32 columns those of column i and i + 16; for each 32 columns a float16 scale, and behind
       all of these a float16 minimum: 5 bits a number (llama.cpp's Q4_1)
"""

import torch
from torch import Tensor

from starling_engine.config import CACHE_GROUP as GROUP

FP8 = torch.float8_e4m3fn
INT8, INT4 = torch.int8, torch.uint8
LARGEST = torch.finfo(torch.float16).max


def columns(kv: Tensor) -> int:
    """Returns the head dimension of a cache [..., row]."""
    size = kv.shape[-1]
    if kv.dtype == INT8:
        return size * GROUP // (GROUP + 2)
    return size * GROUP // (GROUP // 2 + 4) if kv.dtype == INT4 else size


def cached(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Returns x [..., D] as a cache of `dtype` holds it, [..., row]. Scales are of float8_e4m3fn: numbers are divided by them.

    What is beyond the largest number becomes that. A group with what is not a number is read as NaN.
    """
    if dtype == FP8:
        most = torch.finfo(FP8).max
        return (x.float() / scale).clamp(-most, most).to(FP8)
    if dtype in (INT8, INT4):
        groups = _groups(x.float(), GROUP)
        return _eight_bits(groups) if dtype == INT8 else _four_bits(groups)
    return x


def uncached(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns cached rows [..., row] as numbers [..., D] of `dtype`; those of float8_e4m3fn without their scale."""
    dim = columns(rows)
    if rows.dtype == INT8:
        scales = rows[..., dim:].contiguous().view(torch.float16)
        return (_groups(rows[..., :dim], GROUP) * scales[..., None].float()).flatten(-2).to(dtype)
    if rows.dtype == INT4:
        codes = _groups(rows[..., : dim // 2], GROUP // 2)
        scales, minima = rows[..., dim // 2 :].contiguous().view(torch.float16)[..., None].float().chunk(2, -2)
        return (torch.cat((codes & 15, codes >> 4), -1) * scales + minima).flatten(-2).to(dtype)
    return rows.to(dtype)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _eight_bits(groups: Tensor) -> Tensor:
    scales = _half(groups.abs().amax(-1, keepdim=True) / 127 + _broken(groups))
    codes = (groups * _inverse(scales)).round().clamp(-127, 127).to(INT8)
    return torch.cat((codes.flatten(-2), scales.squeeze(-1).view(INT8)), -1)


def _four_bits(groups: Tensor) -> Tensor:
    minima = _half(groups.amin(-1, keepdim=True))
    above = groups - minima.float()
    scales = _half((groups.amax(-1, keepdim=True) - minima.float()) / 15 + _broken(groups))
    low, high = (above * _inverse(scales)).round().clamp(0, 15).to(INT4).chunk(2, -1)
    return torch.cat(((low | high << 4).flatten(-2), *(each.squeeze(-1).view(INT4) for each in (scales, minima))), -1)


def _half(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST, LARGEST).to(torch.float16)


def _broken(groups: Tensor) -> Tensor:
    """Returns NaN where a group has what is not a number, else 0."""
    return (groups - groups).sum(-1, keepdim=True)


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1 / wide, 0.0)
