"""Matrices in 2 to 8 bits, with a scale for each group of columns of a row: how they are made, and their product in torch.

The product with whole numbers quantizes the rows of x, too, to 8 bits, by groups of as many columns. `quantized_ops` has kernels of
the same names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from starling_engine.model_config.quantization import Rounding
from starling_engine.native.reference import silu_mul

NOTHING = 1e-30
"""Rows of x that are smaller than this count as zeros."""
NO_COLUMN = -1
"""Stands, in an order of columns, for codes that fill a group up, which are multiplied by 0."""
AT_ONCE = 1 << 20
"""Elements that are quantized at a time: what is made of them on the way stays in the caches."""


GROUPS = (128, 64, 32, 16)
"""Columns of the groups that larger ones are cut into, so that ranks may have some columns each; the best one first."""


@dataclass(frozen=True, slots=True)
class Format:
    """A way to read a matrix's codes: as code - zero, as table[code], or as float8_e4m3fn.

    bits    of a code
    group   columns that share a scale
    zero    the code of 0; with 8 bits always 128, and with a table nothing
    table   a whole number within 127 for each code of 4 bits
    minima  whether each group also has a number that is added
    floats  whether codes of 8 bits are float8_e4m3fn; scales are then float32, and rows of x stay as they are on a CPU
    by_row  whether all groups of a row have one scale
    block_rows  rows, from the whole matrix's first on, that have the same scales
    rounding  how rows of x are rounded to float8_e4m3fn, too, where kernels multiply such: on some GPUs (`kernels.fp8`)
    gathered  columns of a whole row, where they lie in an order of the matrix's own; 0 where they lie as x's
    filled  columns of a whole row's groups as the checkpoint has them, before they are cut or filled up, where gathered
    """

    bits: int
    group: int = 32
    zero: int = 0
    table: tuple[int, ...] | None = None
    minima: bool = False
    floats: bool = False
    gathered: int = 0
    filled: int = 0
    by_row: bool = False
    block_rows: int = 1
    rounding: Rounding = ""

    @property
    def block(self) -> int:
        """Columns of a block of codes: 32, or 16 where kernels have them so, or groups are no multiples of 32."""
        return 16 if self.bits in (2, 6) or self.group % 32 else 32

    @property
    def rounded(self) -> int:
        """Columns of x that are rounded by one scale. In groups of 128, sums of whole numbers are turned into floats less often."""
        return 128 if self.group % 128 == 0 else self.block

    def cut(self, start: int, columns: int) -> "Format | None":
        """Returns the format of some columns of a row, with smaller groups if need be; None where there is none.

        Of gathered columns, any may be taken: groups are filled up, the smallest ones with least.
        """
        if self.gathered:
            return self if columns == self.gathered else replace(self, group=self.block)
        sizes = [self.group, *(size for size in GROUPS if size < self.group and self.group % size == 0)]
        for size in sizes:
            found = replace(self, group=size)
            if start % size == 0 and columns % size == 0 and (self.floats or found.block == self.block):
                return found
        return None

    @property
    def in_order(self) -> "Format":
        """The same for an x whose columns have been gathered."""
        return replace(self, gathered=0, filled=0) if self.gathered else self

    def laid(self, columns: int) -> int:
        """Returns how many columns that many of a row's become, at most, when they are laid group by group and filled up."""
        if not self.gathered:
            return columns
        groups = -(-self.gathered // self.filled)
        if columns < self.gathered:
            # A rank has some columns of each group, nobody knows how many.
            most = columns + min(columns, groups) * (self.group - 1)
            return most // self.group * self.group
        whole, rest = divmod(self.gathered, self.filled)
        return sum(times * -(-size // self.group) * self.group for times, size in ((whole, self.filled), (1, rest)))

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.floats else torch.float16

    @property
    def element_bytes(self) -> float:
        """Bytes of a weight, with its share of scale and minimum."""
        return self.bits / 8 + self.scale_dtype.itemsize * (1 + self.minima) / self.group


INT8 = Format(8, zero=128)
"""llama.cpp's Q8_0."""
INT4 = Format(4, zero=8)
"""llama.cpp's Q4_0."""
FP8 = Format(8, group=64, floats=True, by_row=True, rounding="token")
FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Table of floats in 4 bits (OCP Microscaling Formats 1.0), all twice as large, since it holds whole numbers."""


@dataclass(frozen=True, slots=True)
class GroupQuantized:
    """A matrix [N, K]: scale * what its codes stand for, plus the group's minimum where its format has one.

    codes           [N, K] uint8
    scales, minima  [N, K / group] of the format's dtype
    order           [K] int32 where the format is gathered: the column of x that each of the codes' is multiplied by, or NO_COLUMN
    input_scale     [] fp32 where rows of x are rounded by a "static" scale
    factor          a power of two that x has to be multiplied by first: less than 1 where scales are too small for float16
    """

    codes: Tensor
    scales: Tensor
    format: Format
    minima: Tensor | None = None
    order: Tensor | None = None
    input_scale: Tensor | None = None
    factor: float = 1.0

    @property
    def plain(self) -> "GroupQuantized":
        """The same for an x as it is: scales that float16 rounds coarsely, or to 0, are so rounded."""
        if self.factor == 1.0:
            return self
        minima = None if self.minima is None else self.minima * self.factor
        return replace(self, scales=self.scales * self.factor, minima=minima, factor=1.0)

    @property
    def in_order(self) -> "GroupQuantized":
        """The same for an x whose columns have been gathered."""
        return replace(self, format=self.format.in_order, order=None)

    def dequantized(self) -> Tensor:
        """Returns the matrix in float32, with columns as x's. Needs little memory besides."""
        n, k = self.codes.shape
        values = torch.empty(n, k)
        step, table = max(1, AT_ONCE // k), table_of(self.format, self.codes.device)
        for start in range(0, n, step):
            rows = slice(start, start + step)
            minima = None if self.minima is None else self.minima[rows]
            values[rows] = numbers_of(self.codes[rows], self.scales[rows], minima, self.format, table) * self.factor
        return values if self.order is None else values[:, places_in(self.order).long()]

    def rows(self, order: Tensor) -> "GroupQuantized":
        """Returns rows in the order [rows] int64."""
        minima = None if self.minima is None else self.minima[order]
        return replace(self, codes=self.codes[order], scales=self.scales[order], minima=minima)

    def padded(self, columns: int) -> "GroupQuantized":
        """Returns the same, gathered, with more columns behind, by which nothing of x is multiplied."""
        assert self.order is not None and columns % self.format.group == 0
        more = columns - self.codes.shape[1]
        groups = more // self.format.group
        minima = None if self.minima is None else F.pad(self.minima, (0, groups))
        codes, order = F.pad(self.codes, (0, more), value=self.format.zero), F.pad(self.order, (0, more), value=NO_COLUMN)
        return replace(self, codes=codes, scales=F.pad(self.scales, (0, groups)), minima=minima, order=order)

    def columns(self, part: slice) -> "GroupQuantized":
        """Returns some columns, cut between groups."""
        start, stop, _ = part.indices(self.codes.shape[1])
        if stop - start == self.codes.shape[1]:
            return self
        assert start % self.format.group == 0 and stop % self.format.group == 0, "cut within a group"
        groups = slice(start // self.format.group, stop // self.format.group)
        minima = None if self.minima is None else self.minima[:, groups].contiguous()
        codes, scales = self.codes[:, start:stop].contiguous(), self.scales[:, groups].contiguous()
        return replace(self, codes=codes, scales=scales, minima=minima)


def gathered(codes: Tensor, scales: Tensor, minima: Tensor | None, group_of: Tensor, form: Format) -> GroupQuantized:
    """Lays the columns of each group side by side, filled up to whole groups of the format.

    codes [N, K], of which column i is of the group group_of [K] int64; scales, minima [N, groups]
    """
    counts = group_of.bincount(minlength=scales.shape[1])
    blocks = -(-counts // form.group)
    groups, columns = group_of.sort(stable=True)
    firsts, starts = counts.cumsum(0) - counts, (blocks.cumsum(0) - blocks) * form.group
    places = starts[groups] + torch.arange(len(groups)) - firsts[groups]
    order = torch.full((int(blocks.sum()) * form.group,), NO_COLUMN, dtype=torch.int32)
    order[places] = columns.int()
    laid = torch.full((codes.shape[0], len(order)), form.zero, dtype=torch.uint8)
    laid[:, places] = codes[:, columns]
    spread = torch.arange(scales.shape[1]).repeat_interleave(blocks)
    return GroupQuantized(laid, scales[:, spread], form, None if minima is None else minima[:, spread], order)


def places_in(order: Tensor) -> Tensor:
    """Returns where each column of x lies among those of a matrix [K'], by its order: [K] int32."""
    return order.argsort()[int((order == NO_COLUMN).sum()) :].int()


def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    """Returns x [M, K] with columns in a matrix's order, 0 for NO_COLUMN."""
    return F.pad(x, (0, 1))[:, order.long()]


def numbers_of(codes: Tensor, scales: Tensor, minima: Tensor | None, form: Format, table: Tensor | None) -> Tensor:
    """Returns what rows of codes [N, K] stand for, in float32; `table` is the format's."""
    if form.floats:
        numbers = codes.view(torch.float8_e4m3fn).float()
    else:
        numbers = codes.float() - form.zero if table is None else table[codes.int()]
    values = _grouped(numbers, form.group).mul_(scales.float()[:, :, None])
    if minima is not None:
        values += minima.float()[:, :, None]
    return values.flatten(1)


def table_of(form: Format, device: torch.device) -> Tensor | None:
    """Returns the numbers of a format's table, fp32; None where it has none."""
    return None if form.table is None else torch.tensor(form.table, dtype=torch.float32, device=device)


def stacked(parts: Sequence[GroupQuantized]) -> GroupQuantized:
    """Returns matrices of one format and factor, one above the other.

    Of static scales of x the largest counts: no number is cut off.
    """
    if len(parts) == 1:
        return parts[0]
    minima = [part.minima for part in parts if part.minima is not None]
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    inputs = [part.input_scale for part in parts if part.input_scale is not None]
    input_scale = torch.stack(inputs).amax() if inputs else None
    whole = torch.cat(minima) if minima else None
    return GroupQuantized(codes, scales, parts[0].format, whole, input_scale=input_scale, factor=parts[0].factor)


def quantize(weight: Tensor, form: Format) -> GroupQuantized:
    """Rounds a matrix [N, K], K a multiple of the group, to the nearest codes of INT8, INT4 or FP8.

    FP8 has one scale for all groups of a row. With 8 bits the largest number of a group becomes 127 or -127. With 4 it becomes -8,
    whatever its sign, so that all 16 codes are used, as in llama.cpp's Q4_0. Needs little memory besides the result.
    """
    n, k = weight.shape
    codes, scales = weight.new_empty(n, k, dtype=torch.uint8), weight.new_empty(n, k // form.group, dtype=form.scale_dtype)
    step = max(1, AT_ONCE // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        codes[rows], scales[rows] = _quantize(weight[rows], form)
    return GroupQuantized(codes, scales, form)


def _quantize(weight: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    if form.floats:
        tops = weight.float().abs().amax(1, keepdim=True).clamp_(min=NOTHING) / FP8_LARGEST
        return (weight.float() / tops).to(torch.float8_e4m3fn).view(torch.uint8), tops.expand(-1, weight.shape[1] // form.group)
    grouped = _grouped(weight.float(), form.group)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scales = (largest.abs() / 127 if form.bits == 8 else largest / -8).half()
    inverse = torch.where(scales == 0, 0.0, 1 / scales.float())
    lowest, highest = (-127, 127) if form.bits == 8 else (-8, 7)
    codes = (grouped * inverse).round_().clamp_(lowest, highest) + form.zero
    return codes.to(torch.uint8).flatten(1), scales.squeeze(2)


def quantized_linear(
    x: Tensor, weight: GroupQuantized, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, *, gated: bool = False
) -> Tensor:
    """Multiplies x [M, K] by the weight, plus bias [N] -> [M, N]; gated, then applies `silu_mul`.

    Where codes are whole numbers, rows of x are rounded to 8 bits by groups.
    """
    rounded = x.float()
    if not weight.format.floats:
        grouped = _grouped(rounded, weight.format.rounded)
        top = grouped.abs().amax(2, keepdim=True)
        codes = (grouped * torch.where(top > NOTHING, torch.full_like(top, 127) / top, 0.0)).round()  # `127 / top` rounds twice
        rounded = (codes * (top / 127)).flatten(1)
    sums = (rounded.double() @ weight.dequantized().double().T).float()
    if bias is not None:
        sums += bias.float()
    return (silu_mul(sums) if gated else sums).to(out_dtype)


def unpacked_linear(
    x: Tensor, weight: GroupQuantized, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, *, gated: bool = False
) -> Tensor:
    """Does as `quantized_linear` where codes become numbers in bfloat16 on the way, and rows of x stay as they are."""
    sums = (x.double() @ weight.dequantized().bfloat16().double().T).float()
    if bias is not None:
        sums += bias.float()
    return (silu_mul(sums) if gated else sums).to(out_dtype)


def _grouped(matrix: Tensor, group: int) -> Tensor:
    """[N, K] -> [N, K / group, group]."""
    return matrix.reshape(matrix.shape[0], matrix.shape[1] // group, group)
