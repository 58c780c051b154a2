"""The kernels for matrices in 4 or 8 bits. `group_quantized` defines their results: the product, and the dequantized rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from starling_engine.native import ops
from starling_engine.native.group_quantized import GROUP, ZERO, GroupQuantized


@dataclass(frozen=True, slots=True)
class PackedQuantized:
    """A matrix [n, k] as the kernels read it; `kernels/quantized_linear.cpp` says how it lies."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    bits: int
    n: int
    k: int
    gated: bool

    @property
    def width(self) -> int:
        """Columns of the output of `quantized_linear`."""
        return self.n // 2 if self.gated else self.n

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)


def pack_quantized(weight: GroupQuantized, *, gated: bool = False) -> PackedQuantized:
    """Packs a matrix [N, K], K a multiple of 32; N one of 16 where gated."""
    n, k = weight.codes.shape
    assert k % GROUP == 0 and (not gated or n % ops.BLOCK_COLUMNS == 0)
    assert weight.codes.dtype == torch.uint8 and weight.codes.is_contiguous()
    for each in (weight.scales, weight.minima):
        assert each is None or (each.dtype == torch.float16 and each.is_contiguous() and each.shape == (n, k // GROUP))
    blocks = -(-n // ops.BLOCK_COLUMNS)
    codes = torch.empty(blocks, k // GROUP, GROUP * ops.BLOCK_COLUMNS * weight.bits // 8, dtype=torch.uint8)
    scales = torch.empty(blocks, k // GROUP, ops.BLOCK_COLUMNS, dtype=torch.float16)
    minima = None if weight.minima is None else torch.empty_like(scales)
    packed = PackedQuantized(codes, scales, minima, weight.bits, n, k, gated)
    ops.library().starling_huge_pages(codes.data_ptr(), codes.nbytes)
    ops.library().starling_pack_quantized(
        *_addresses(weight),
        n,
        k,
        weight.bits,
        gated,
        *_addresses(packed),
        torch.get_num_threads(),
    )
    return packed


def _addresses(weight: GroupQuantized | PackedQuantized) -> tuple[int, int, int | None]:
    """Returns the addresses of codes, scales and minima, in the kernels' order."""
    minima = None if weight.minima is None else weight.minima.data_ptr()
    return weight.codes.data_ptr(), weight.scales.data_ptr(), minima


def quantized_linear(
    x: Tensor, weight: PackedQuantized, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiplies x [M, K] bf16 (rows may be strided), rounded to 8 bits by groups, by the weight, plus bias [N] bf16.

    Gives [M, N] bf16 or fp32. A gated weight gives silu of the product's first half times the second, [M, N / 2].
    """
    m, k = x.shape
    assert x.dtype == torch.bfloat16 and k == weight.k and x.stride(1) == 1
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == (weight.n,) and bias.is_contiguous())
    assert out_dtype in (torch.float32, torch.bfloat16)
    out = torch.empty(m, weight.width, dtype=out_dtype)
    ops.library().starling_quantized_linear(
        x.data_ptr(),
        x.stride(0),
        m,
        *_addresses(weight),
        weight.n,
        k,
        weight.bits,
        ZERO[weight.bits],
        None if bias is None else bias.data_ptr(),
        weight.gated,
        out.data_ptr(),
        out_dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def embedding_quantized(ids: Tensor, weight: PackedQuantized, out: Tensor) -> None:
    """Dequantizes the rows ids [T] int64 of the weight -> out [T, K] bf16."""
    assert ids.dtype == torch.int64 and ids.is_contiguous() and not weight.gated
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == (ids.shape[0], weight.k)
    ops.library().starling_embedding_quantized(
        ids.data_ptr(),
        ids.shape[0],
        *_addresses(weight),
        weight.k,
        weight.bits,
        ZERO[weight.bits],
        out.data_ptr(),
        torch.get_num_threads(),
    )
