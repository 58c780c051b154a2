"""The kernels for matrices in 2 to 8 bits. `group_quantized` defines their results: the product, and the dequantized rows."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from starling_engine.gguf.reader import BlockType
from starling_engine.native import ops
from starling_engine.native.gguf_blocks import FORMATS
from starling_engine.native.group_quantized import Format, GroupQuantized

WITH_TABLE = 128
"""Kernels hold a table's numbers plus this: they multiply bytes without sign."""


@dataclass(frozen=True, slots=True)
class PackedQuantized:
    """A matrix [n, k] as the kernels read it; `kernels/quantized_linear.cpp` says how it lies."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    format: Format
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

    @property
    def zero(self) -> int:
        return self.format.zero if self.format.table is None else WITH_TABLE


def read_gguf(raw: Tensor, block: BlockType) -> GroupQuantized:
    """Reads rows [N, bytes of a row] uint8 of one of the types of `gguf_blocks.FORMATS`."""
    form = FORMATS[block.name]
    n, blocks = raw.shape[0], raw.shape[1] // block.size
    k = blocks * block.elements
    raw = raw.contiguous()
    codes, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, k // form.group, dtype=torch.float16)
    found = GroupQuantized(codes, scales, form, torch.empty_like(scales) if form.minima else None)
    ops.library().starling_huge_pages(codes.data_ptr(), codes.nbytes)
    done = ops.library().starling_read_gguf(
        raw.data_ptr(), n, blocks, block.size, block.number, codes.data_ptr(), k, *_addresses(found)[1:3], k // form.group,
        torch.get_num_threads(),
    )  # fmt: skip
    assert done, block.name
    return found


def pack_quantized(weight: GroupQuantized, *, gated: bool = False) -> PackedQuantized:
    """Packs a matrix [N, K], K a multiple of the group; N one of 16 where gated."""
    (n, k), form = weight.codes.shape, weight.format
    assert k % form.group == 0 and (not gated or n % ops.BLOCK_COLUMNS == 0)
    assert weight.codes.dtype == torch.uint8 and weight.codes.is_contiguous()
    groups = k // form.group
    for each in (weight.scales, weight.minima):
        assert each is None or (each.dtype == torch.float16 and each.is_contiguous() and each.shape == (n, groups))
    blocks = -(-n // ops.BLOCK_COLUMNS)
    codes = torch.empty(blocks, groups, form.group * ops.BLOCK_COLUMNS * form.bits // 8, dtype=torch.uint8)
    scales = torch.empty(blocks, groups, ops.BLOCK_COLUMNS, dtype=torch.float16)
    minima = None if weight.minima is None else torch.empty_like(scales)
    packed = PackedQuantized(codes, scales, minima, form, n, k, gated)
    ops.library().starling_huge_pages(codes.data_ptr(), codes.nbytes)
    ops.library().starling_pack_quantized(
        *_addresses(weight), n, k, groups, form.bits, gated, *_addresses(packed)[:3], torch.get_num_threads()
    )
    return packed


def _addresses(weight: GroupQuantized | PackedQuantized) -> tuple[int, int, int | None, int | None]:
    """Returns the addresses of codes, scales, minima and table, in the kernels' order."""
    minima = None if weight.minima is None else weight.minima.data_ptr()
    table = weight.format.table
    return weight.codes.data_ptr(), weight.scales.data_ptr(), minima, None if table is None else _table(table).data_ptr()


@functools.cache
def _table(numbers: tuple[int, ...]) -> Tensor:
    assert len(numbers) == 16, "codes have 4 bits"
    return torch.tensor([number + WITH_TABLE for number in numbers], dtype=torch.uint8)


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
        weight.scales.shape[1],
        weight.format.bits,
        weight.zero,
        None if bias is None else bias.data_ptr(),
        weight.gated,
        out.data_ptr(),
        out_dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def embedding_quantized(ids: Tensor, weight: PackedQuantized) -> Tensor:
    """Dequantizes the rows ids [T] int64 of the weight -> [T, K] bf16."""
    assert ids.dtype == torch.int64 and ids.is_contiguous() and not weight.gated
    out = torch.empty(ids.shape[0], weight.k, dtype=torch.bfloat16)
    ops.library().starling_embedding_quantized(
        ids.data_ptr(),
        ids.shape[0],
        *_addresses(weight),
        weight.k,
        weight.scales.shape[1],
        weight.format.bits,
        weight.zero,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
