"""The kernels for matrices in 2 to 8 bits. `group_quantized` defines their results: the product, and the dequantized rows.

Whole numbers, and floats of 8 bits, have kernels of their own (`kernels/quantized_linear.cpp` and `kernels/fp8_linear.cpp`).
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from starling_engine.gguf.reader import BlockType
from starling_engine.model_config.moe import ExpertGate
from starling_engine.native import ops
from starling_engine.native.bindings import library
from starling_engine.native.gguf_blocks import FORMATS
from starling_engine.native.group_quantized import Format, GroupQuantized
from starling_engine.native.weight_memory import WEIGHTS, huge_pages

WITH_TABLE = 128
"""Kernels hold a table's numbers plus this: they multiply bytes without sign."""


@dataclass(frozen=True)
class PackedQuantized:
    """A matrix [n, k] as the kernels read it; they say how it lies.

    Those of experts are one behind the other: the first dimension of codes, scales and minima.
    """

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
        return sum(each.nbytes for each in self.tensors)

    @functools.cached_property
    def arguments(self) -> tuple[int | None, ...]:
        """Addresses, n, k, how columns are cut, bits and zero, as kernels take them. Looked up once, for a step has many calls."""
        form = self.format
        if form.floats:
            return (*_addresses(self)[:2], self.n, self.k, self.k // form.group)
        return (*_addresses(self), self.n, self.k, *_columns(self), form.bits, self.zero)

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.codes, self.scales, self.minima) if each is not None]

    def expert(self, index: int) -> "PackedQuantized":
        """Returns the matrix of one expert, in the same memory."""
        minima = None if self.minima is None else self.minima[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], minima=minima)

    @property
    def zero(self) -> int:
        return self.format.zero if self.format.table is None else WITH_TABLE


def read_gguf(raw: Tensor, block: BlockType) -> GroupQuantized:
    """Reads rows [N, bytes of a row] uint8 of one of the types of `gguf_blocks.FORMATS`."""
    form = FORMATS[block.name]
    n, blocks = raw.shape[0], raw.shape[1] // block.size
    k = blocks * block.elements
    raw = raw.contiguous()
    codes, scales = huge_pages(n * k).view(n, k), torch.empty(n, k // form.group, dtype=torch.float16)
    found = GroupQuantized(codes, scales, form, torch.empty_like(scales) if form.minima else None)
    done = library().starling_read_gguf(
        raw.data_ptr(), n, blocks, block.size, block.number, codes.data_ptr(), k, *_addresses(found)[1:3], k // form.group,
        torch.get_num_threads(),
    )  # fmt: skip
    assert done, block.name
    return found


def pack_quantized(weight: GroupQuantized, *, gated: bool = False) -> PackedQuantized:
    """Packs a matrix [N, K], K a multiple of the group; N one of 16 where gated."""
    if weight.format.floats and bool((weight.scales == weight.scales[:, :1]).all()):
        # One scale a row costs nothing until the end of the row.
        whole = replace(weight.format, group=weight.codes.shape[1])
        weight = replace(weight, scales=weight.scales[:, :1].contiguous(), format=whole)
    packed = _empty(weight.codes.shape[0], weight.codes.shape[1], weight.format, gated)
    _pack(weight, packed)
    return packed


def empty_quantized_experts(experts: int, n: int, k: int, form: Format, *, gated: bool = False) -> PackedQuantized:
    """Reserves memory for the matrices [n, k] of `experts`, which `pack_quantized_expert` fills. See `ops.empty_experts`."""
    return _empty(n, k, form, gated, experts)


def pack_quantized_expert(weight: GroupQuantized, experts: PackedQuantized, index: int) -> None:
    """Packs the matrix [N, K] of one expert into its part of the memory."""
    _pack(weight, experts.expert(index))


def _empty(n: int, k: int, form: Format, gated: bool, *leading: int) -> PackedQuantized:
    assert k % form.group == 0 and (not gated or n % ops.BLOCK_COLUMNS == 0)
    assert form.group % (16 if form.floats else form.block) == 0
    blocks = -(-n // ops.BLOCK_COLUMNS)
    codes = WEIGHTS.empty((*leading, blocks, k * ops.BLOCK_COLUMNS * form.bits // 8), torch.uint8)
    sides = [
        WEIGHTS.empty((*leading, blocks, k // form.group, ops.BLOCK_COLUMNS), form.scale_dtype) for _ in range(1 + form.minima)
    ]
    return PackedQuantized(codes, sides[0], sides[1] if form.minima else None, form, n, k, gated)


def _pack(weight: GroupQuantized, to: PackedQuantized) -> None:
    groups = to.k // to.format.group
    assert weight.format == to.format and weight.codes.shape == (to.n, to.k)
    assert weight.codes.dtype == torch.uint8 and weight.codes.is_contiguous()
    for each in (weight.scales, weight.minima):
        assert each is None or (each.dtype == to.format.scale_dtype and each.is_contiguous() and each.shape == (to.n, groups))
    if to.format.floats:
        (codes, scales), (out, out_scales) = _addresses(weight)[:2], _addresses(to)[:2]
        library().starling_pack_fp8(codes, scales, to.n, to.k, groups, to.gated, out, out_scales, torch.get_num_threads())
        return
    library().starling_pack_quantized(
        *_addresses(weight), to.n, to.k, *_columns(to), to.format.bits, to.gated, *_addresses(to)[:3], torch.get_num_threads()
    )


def _addresses(weight: GroupQuantized | PackedQuantized) -> tuple[int, int, int | None, int | None]:
    """Returns the addresses of codes, scales, minima and table, in the kernels' order."""
    minima = None if weight.minima is None else weight.minima.data_ptr()
    table = weight.format.table
    return weight.codes.data_ptr(), weight.scales.data_ptr(), minima, None if table is None else _table(table).data_ptr()


def _columns(weight: PackedQuantized) -> tuple[int, int, int]:
    """Returns the columns of a block, the blocks by which x is rounded, and how many such groups share a scale of the weight."""
    form = weight.format
    return form.block, form.rounded // form.block, form.group // form.rounded


@functools.cache
def _table(numbers: tuple[int, ...]) -> Tensor:
    assert len(numbers) == 16, "codes have 4 bits"
    return torch.tensor([number + WITH_TABLE for number in numbers], dtype=torch.uint8)


def quantized_linear(
    x: Tensor,
    weight: PackedQuantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies x [M, K] bf16 (rows may be strided) by the weight, plus bias [N] bf16.

    Where codes are whole numbers, rows of x are rounded to 8 bits by groups. Gives [M, N] bf16 or fp32, in `out` if that is given
    (rows may be strided). A gated weight gives silu of the product's first half times the second, [M, N / 2].
    """
    m, k = x.shape
    assert x.dtype == torch.bfloat16 and k == weight.k and x.stride(1) == 1
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.shape == (weight.n,) and bias.is_contiguous())
    out = torch.empty(m, weight.width, dtype=out_dtype) if out is None else out
    assert out.dtype in (torch.float32, torch.bfloat16) and out.shape == (m, weight.width) and out.stride(1) == 1
    floats = weight.format.floats
    (library().starling_fp8_linear if floats else library().starling_quantized_linear)(
        x.data_ptr(),
        x.stride(0),
        m,
        *weight.arguments,
        None if bias is None else bias.data_ptr(),
        weight.gated,
        out.data_ptr(),
        out.stride(0),
        out.dtype is torch.float32,
        torch.get_num_threads(),
    )
    return out


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """x [M, K] bf16 (rows may be strided), order [K'] int32 -> [M, K'], on as many threads as torch has."""
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and order.dtype == torch.int32 and order.is_contiguous()
    out = torch.empty(x.shape[0], order.shape[0], dtype=torch.bfloat16)
    library().starling_gather_columns(
        x.data_ptr(), x.stride(0), *x.shape[:1], order.data_ptr(), *order.shape, out.data_ptr(), torch.get_num_threads()
    )
    return out


def gather_columns_of_pairs(x: Tensor, tokens: Tensor | None, starts: Tensor, orders: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """Gives each pair of token and slot a row, with its columns in the slot's order. Pairs are sorted as `ops.grouped_linear` says.

    x [T, K] bf16 (rows may be strided), tokens [S] int64, or None where rows of x are pairs; orders [slots, K'] int32
    -> [S, K'], and the row of each pair [S] int64
    """
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and orders.dtype == torch.int32 and orders.is_contiguous()
    assert starts.shape[0] == orders.shape[0] + 1
    out, places = torch.empty(pairs, orders.shape[1], dtype=torch.bfloat16), torch.empty(pairs, dtype=torch.int64)
    library().starling_gather_columns_of_pairs(
        x.data_ptr(), x.stride(0), None if tokens is None else tokens.data_ptr(), starts.data_ptr(), orders.shape[0],
        orders.data_ptr(), orders.shape[1], out.data_ptr(), places.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out, places


def grouped_quantized_linear(
    x: Tensor,
    tokens: Tensor,
    starts: Tensor,
    experts: PackedQuantized,
    biases: Tensor | None = None,
    gate: ExpertGate | None = None,
) -> Tensor:
    """Does as `ops.grouped_linear`, with rows of x as `quantized_linear` has them."""
    assert x.dtype == torch.bfloat16 and x.shape[1] == experts.k and x.stride(1) == 1
    ops.check_pairs(tokens, starts, experts.codes)
    out = torch.empty(tokens.shape[0], experts.width, dtype=torch.bfloat16)
    floats = experts.format.floats
    (library().starling_grouped_fp8_linear if floats else library().starling_grouped_quantized_linear)(
        x.data_ptr(),
        x.stride(0),
        tokens.data_ptr(),
        starts.data_ptr(),
        starts.shape[0] - 1,
        *experts.arguments,
        ops.address_of(biases, experts),
        experts.gated,
        *ops.gate_arguments(gate),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def grouped_quantized_sum(
    x: Tensor,
    tokens: Tensor,
    weights: Tensor,
    starts: Tensor,
    experts: PackedQuantized,
    num_tokens: int,
    biases: Tensor | None = None,
) -> Tensor:
    """Does as `ops.grouped_sum`, with rows of x as `quantized_linear` has them."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape == (tokens.shape[0], experts.k) and not experts.gated
    assert weights.dtype == torch.float32 and weights.shape == tokens.shape and weights.is_contiguous()
    ops.check_pairs(tokens, starts, experts.codes)
    out = torch.empty(num_tokens, experts.n, dtype=torch.bfloat16)
    floats = experts.format.floats
    (library().starling_grouped_fp8_sum if floats else library().starling_grouped_quantized_sum)(
        x.data_ptr(),
        tokens.data_ptr(),
        weights.data_ptr(),
        starts.data_ptr(),
        starts.shape[0] - 1,
        *experts.arguments,
        ops.address_of(biases, experts),
        out.data_ptr(),
        num_tokens,
        torch.get_num_threads(),
    )
    return out


def embedding_quantized(ids: Tensor, weight: PackedQuantized) -> Tensor:
    """Dequantizes the rows ids [T] int64 of the weight -> [T, K] bf16."""
    assert ids.dtype == torch.int64 and ids.is_contiguous() and not weight.gated
    out = torch.empty(ids.shape[0], weight.k, dtype=torch.bfloat16)
    floats = weight.format.floats
    (library().starling_embedding_fp8 if floats else library().starling_embedding_quantized)(
        ids.data_ptr(),
        ids.shape[0],
        *weight.arguments,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
