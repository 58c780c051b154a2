"""Matrices in 4 or 8 bits, with a scale for each group of 32 columns of a row: how they are made, and their product in torch.

The product quantizes the rows of x, too, by groups of 32, to 8 bits. `quantized_ops` has the kernels of the same names.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from starling_engine.native.reference import silu_mul

GROUP = 32
"""Columns that share a scale. 32 is llama.cpp's for Q4_0, Q4_1 and Q8_0."""
ZERO = {4: 8, 8: 128}
"""The code of 0, by bits."""
NOTHING = 1e-30
"""Rows of x that are smaller than this count as zeros."""
AT_ONCE = 1 << 20
"""Elements that are quantized at a time: what is made of them on the way stays in the caches."""


@dataclass(frozen=True, slots=True)
class GroupQuantized:
    """A matrix [N, K]: scale * (code - ZERO[bits]), plus the group's minimum where its format has one (Q4_1, AWQ and GPTQ do).

    codes           [N, K] uint8
    scales, minima  [N, K / 32] float16
    """

    codes: Tensor
    scales: Tensor
    bits: int
    minima: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Returns the matrix in float32."""
        grouped = _grouped(self.codes).float() - ZERO[self.bits]
        values = grouped * self.scales.float()[:, :, None]
        if self.minima is not None:
            values += self.minima.float()[:, :, None]
        return values.flatten(1)


def quantize(weight: Tensor, bits: int) -> GroupQuantized:
    """Rounds a matrix [N, K], K a multiple of 32, to the nearest codes without minima.

    With 8 bits the largest number of a group becomes 127 or -127. With 4 it becomes -8, whatever its sign, so that all 16 codes are
    used, as in llama.cpp's Q4_0. Needs little memory besides the result.
    """
    n, k = weight.shape
    codes, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, k // GROUP, dtype=torch.float16)
    step = max(1, AT_ONCE // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        codes[rows], scales[rows] = _quantize(weight[rows], bits)
    return GroupQuantized(codes, scales, bits)


def _quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    grouped = _grouped(weight.float())
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scales = (largest.abs() / 127 if bits == 8 else largest / -8).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    lowest, highest = (-127, 127) if bits == 8 else (-8, 7)
    codes = (grouped * inverse).round_().clamp_(lowest, highest) + ZERO[bits]
    return codes.to(torch.uint8).flatten(1), scales.squeeze(2)


def quantized_linear(
    x: Tensor, weight: GroupQuantized, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, *, gated: bool = False
) -> Tensor:
    """Multiplies x [M, K], rounded to 8 bits by groups, by the weight, plus bias [N] -> [M, N]; gated, then applies `silu_mul`."""
    grouped = _grouped(x.float())
    top = grouped.abs().amax(2, keepdim=True)
    codes = (grouped * torch.where(top > NOTHING, torch.full_like(top, 127) / top, 0.0)).round()  # `127 / top` rounds twice
    rounded = (codes * (top / 127)).flatten(1)
    sums = (rounded.double() @ weight.dequantized().double().T).float()
    if bias is not None:
        sums += bias.float()
    return (silu_mul(sums) if gated else sums).to(out_dtype)


def _grouped(matrix: Tensor) -> Tensor:
    """[N, K] -> [N, K / 32, 32]."""
    return matrix.reshape(matrix.shape[0], matrix.shape[1] // GROUP, GROUP)
