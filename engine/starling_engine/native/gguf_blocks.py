"""Blocks of GGUF's types of tensors as codes, scales and minima, and as numbers (ggml's ggml-common.h and ggml-quants.c).

Codes stay what they are. Scales of types in 2 to 6 bits with superblocks of 256 are products of two numbers there: here they are
rounded to float16.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from starling_engine.gguf.reader import BlockType
from starling_engine.native.group_quantized import E2M1, INT4, INT8, Format, GroupQuantized

AT_ONCE = 1 << 20
"""Elements that are converted at a time: what is made of them on the way stays in the caches."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
Blocks = tuple[Tensor, Tensor, Tensor | None]
"""codes [R, elements] uint8, scales [R, groups] fp16 or fp32, minima the same or None, of R blocks."""


def _half(bytes_: Tensor) -> Tensor:
    """[R, 2 n] -> [R, n] float16."""
    return bytes_.contiguous().view(torch.float16)


def _halves(bytes_: Tensor) -> Tensor:
    """[..., n] -> [..., 2 n]: the low four bits of all, then the high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1)


def _fifth_bits(bits: Tensor) -> Tensor:
    """[R, 4] -> [R, 32]: bit i of the 32, times 16."""
    return (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4


def _q4_0(raw: Tensor) -> Blocks:
    return _halves(raw[:, 2:]), _half(raw[:, :2]), None


def _q4_1(raw: Tensor) -> Blocks:
    return _halves(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Blocks:
    return _halves(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), _half(raw[:, :2]), None


def _q5_1(raw: Tensor) -> Blocks:
    return _halves(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Blocks:
    return raw[:, 2:] ^ 128, _half(raw[:, :2]), None


def _q2_k(raw: Tensor) -> Blocks:
    scales, quarters = raw[:, :16], raw[:, 16:80]
    scale, minimum = _half(raw[:, 80:82]).float(), _half(raw[:, 82:84]).float()
    return _two_bits(quarters), scale * (scales & 15), -minimum * (scales >> 4)


def _q3_k(raw: Tensor) -> Blocks:
    mask, quarters, packed = raw[:, :32], raw[:, 32:96], raw[:, 96:108]
    high = (mask[:, None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1) << 2
    top = (packed[:, None, 8:] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(1) << 4
    scales = (_halves(packed[:, :8]) | top).float() - 32
    return _two_bits(quarters) | high, _half(raw[:, 108:110]).float() * scales, None


def _two_bits(bytes_: Tensor) -> Tensor:
    """[R, 64] -> [R, 256]: 32 bytes hold 128 elements, whose quarters are 2 bits each."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return (bytes_.reshape(-1, 2, 1, 32) >> shifts & 3).flatten(1)


def _q4_k(raw: Tensor) -> Blocks:
    scales, minima = _scales_of_eight(raw)
    return _halves(raw[:, 16:].reshape(-1, 4, 32)).flatten(1), scales, minima


def _q5_k(raw: Tensor) -> Blocks:
    scales, minima = _scales_of_eight(raw)
    low, bits = _halves(raw[:, 48:].reshape(-1, 4, 32)), raw[:, None, 16:48]
    fifth = bits >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return low.flatten(1) | fifth.flatten(1) << 4, scales, minima


def _scales_of_eight(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima [R, 8] of Q4_K and Q5_K: each in 6 bits, of which the last four have two elsewhere."""
    scale, minimum, packed = _half(raw[:, :2]).float(), _half(raw[:, 2:4]).float(), raw[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], 1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], 1)
    return scale * scales, -minimum * minima


def _q6_k(raw: Tensor) -> Blocks:
    low, high, scales = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 1, 32), raw[:, 192:208]
    top = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(1) << 4
    return _halves(low).flatten(1) | top, _half(raw[:, 208:]).float() * scales.view(torch.int8), None


def _iq4_xs(raw: Tensor) -> Blocks:
    low = raw[:, 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    high = raw[:, 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    scales = (low.flatten(1) | high.flatten(1) << 4).float() - 32
    return _halves(raw[:, 8:].reshape(-1, 8, 16)).flatten(1), _half(raw[:, :2]).float() * scales, None


def _mxfp4(raw: Tensor) -> Blocks:
    return _halves(raw[:, 1:]), torch.exp2(raw[:, :1].float() - 128), None


_TABLE_IQ4, _TABLE_E2M1 = Format(4, table=_IQ4), Format(4, table=E2M1)
_TYPES: dict[str, tuple[Format, Callable[[Tensor], Blocks]]] = {
    "Q4_0": (INT4, _q4_0),
    "Q4_1": (Format(4, minima=True), _q4_1),
    "Q5_0": (Format(5, zero=16), _q5_0),
    "Q5_1": (Format(5, minima=True), _q5_1),
    "Q8_0": (INT8, _q8_0),
    "Q2_K": (Format(2, group=16, minima=True), _q2_k),
    "Q3_K": (Format(4, group=16, zero=4), _q3_k),
    "Q4_K": (Format(4, minima=True), _q4_k),
    "Q5_K": (Format(5, minima=True), _q5_k),
    "Q6_K": (Format(6, group=16, zero=32), _q6_k),
    "IQ4_NL": (_TABLE_IQ4, _q4_0),
    "IQ4_XS": (_TABLE_IQ4, _iq4_xs),
    "MXFP4": (_TABLE_E2M1, _mxfp4),
}
FORMATS = {name: form for name, (form, _) in _TYPES.items()}
"""Formats of the codes, by type. Those of Q3_K are kept in 4 bits."""


def read_blocks(raw: Tensor, block: BlockType) -> GroupQuantized:
    """Reads rows [N, bytes of a row] uint8 of a type of FORMATS, however they lie in memory."""
    form = FORMATS[block.name]
    n, k = raw.shape[0], raw.shape[1] // block.size * block.elements
    codes, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, k // form.group, dtype=torch.float16)
    minima = torch.empty_like(scales) if form.minima else None
    for rows, part in _parts(raw, block):
        codes[rows], scales[rows] = part.codes, part.scales
        if minima is not None and part.minima is not None:
            minima[rows] = part.minima
    return GroupQuantized(codes, scales, form, minima)


def dequantize_blocks(raw: Tensor, block: BlockType, dtype: torch.dtype) -> Tensor:
    """Reads the same rows as numbers [N, elements], without rounding scales."""
    out = torch.empty(raw.shape[0], raw.shape[1] // block.size * block.elements, dtype=dtype)
    for rows, part in _parts(raw, block):
        out[rows] = part.dequantized()
    return out


def _parts(raw: Tensor, block: BlockType) -> Iterator[tuple[slice, GroupQuantized]]:
    """Yields some rows at a time, with scales as exact as they are."""
    form, read = _TYPES[block.name]
    k = raw.shape[1] // block.size * block.elements
    step, groups = max(1, AT_ONCE // k), k // form.group
    for start in range(0, raw.shape[0], step):
        rows = slice(start, start + step)
        codes, scales, minima = read(raw[rows].reshape(-1, block.size))
        least = None if minima is None else minima.reshape(-1, groups)
        yield rows, GroupQuantized(codes.reshape(-1, k), scales.reshape(-1, groups), form, least)
