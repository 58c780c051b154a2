"""A matrix that a safetensors checkpoint keeps as several tensors of a module: codes, scales, zero points."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import WeightScheme
from starling_engine.native.group_quantized import GROUPS, Format, GroupQuantized, gathered
from starling_engine.weights.source import Index, TensorInfo

Read = Callable[[str, Index], Tensor]
"""Reads a part of one of the module's tensors, by its ending."""
Endings = Mapping[str, TensorInfo]
"""The module's tensors that belong to the matrix, by what follows the module's name."""

_KERNELS = ((2, 16), (4, 16), (5, 32), (6, 16), (8, 32))
"""Bits of the codes that kernels multiply, and what groups have to be multiples of."""
_PLAIN_BITS = 16
"""Bits of a number. Groups are not filled up to take more."""
_COARSE = 2.0**-15
"""Scales below 2^-14 lose bits in float16. Where the largest is not below this, nothing is wrong by more than 1/1024 of it."""


class QuantizedMatrix(ABC):
    """A matrix [N, K]. Those of each kind check in their constructor that the module's tensors fit together, from their headers.

    form   how kernels read its codes; None where they cannot, and numbers are taken
    """

    shape: tuple[int, int]
    element_bytes: float
    form: Format | None = None
    label: str

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        """Raises WeightError naming the module, where its tensors do not fit together."""
        self.module = module
        self.tensors = tensors
        self.scheme = scheme

    @abstractmethod
    def numbers(self, read: Read, rows: slice) -> Tensor:
        """Returns rows [R, K] in float32."""

    def _describe(self, label: str, shape: tuple[int, int], bits: float, groups: int) -> None:
        """Sets what the headers tell. `groups` are the scales of a row, of two bytes."""
        self.label, self.shape = label, shape
        self.element_bytes = bits / 8 + 2 * groups / shape[1]

    def _shape_of(self, ending: str, dims: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a tensor, which has so many dimensions, none of them empty."""
        if ending not in self.tensors:
            raise WeightError(f"checkpoint: {self.module}.{ending} is missing")
        shape = self.tensors[ending].shape
        if 0 in shape or (dims is not None and len(shape) != dims):
            wanted = "no empty dimension" if dims is None else f"{dims} dimensions, none of them empty"
            raise WeightError(f"checkpoint: {self.module}.{ending} {list(shape)} has the wrong shape (expected {wanted})")
        return shape

    def _check(self, ending: str, *expected: tuple[int, ...]) -> None:
        shape = self._shape_of(ending)
        if shape not in expected:
            wanted = " or ".join(str(list(each)) for each in expected)
            raise WeightError(f"checkpoint: {self.module}.{ending} {list(shape)} has the wrong shape (expected {wanted})")

    def _group_of(self, ending: str, groups: int) -> int:
        """Returns the columns of each of a row's `groups`. Raises WeightError where they are not alike, or not the config's."""
        columns = self.shape[1]
        group = columns // groups
        if columns % groups or self.scheme.group not in (None, group):
            wanted = "" if self.scheme.group is None else f" of {self.scheme.group}"
            raise WeightError(f"checkpoint: {self.module}.{ending} has {groups} groups{wanted} for {columns} columns")
        return group


class CodedMatrix(QuantizedMatrix):
    """A matrix whose codes kernels may read."""

    @abstractmethod
    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        """Returns rows with codes as in `form`; groups are the checkpoint's, and scales and minima float32 (see `part`)."""

    def numbers(self, read: Read, rows: slice) -> Tensor:
        return self.codes(read, rows).dequantized()

    def part(self, read: Read, rows: slice, columns: slice) -> GroupQuantized:
        """Returns a part for kernels. Raises WeightError where their scales cannot be the checkpoint's."""
        return self._for_kernels(self.codes(read, rows), self._form_of(columns)).columns(columns)

    def _form_of(self, columns: slice) -> Format:
        start, stop, _ = columns.indices(self.shape[1])
        form = self.form and self.form.cut(start, stop - start)
        assert form is not None, "has no codes that kernels know"
        return form

    def _for_kernels(self, matrix: GroupQuantized, form: Format) -> GroupQuantized:
        """Returns the same codes with groups of the format's size, and scales of its dtype."""
        repeats, factor = matrix.format.group // form.group, 1.0 if form.floats else _factor_of(matrix.scales)
        scales, minima = (
            None if each is None else (each / factor).to(form.scale_dtype).repeat_interleave(repeats, 1)
            for each in (matrix.scales, matrix.minima)
        )
        assert scales is not None
        if not all(each is None or bool(each.isfinite().all()) for each in (scales, minima)):
            dtype = str(form.scale_dtype).removeprefix("torch.")
            raise WeightError(f"{self.module}.weight has scales that {dtype} cannot hold")
        return replace(matrix, codes=matrix.codes.contiguous(), scales=scales, format=form, minima=minima, factor=factor)


class IntegerMatrix(CodedMatrix):
    """Whole numbers with a scale, and maybe a zero point, for each group of columns of a row.

    Kernels have groups side by side, of sizes of their own. Where a row's are not so, its columns are gathered.
    """

    _order: str | None = None
    """The ending of the tensor that has the group of each column, where the scheme is ordered."""

    def _set_form(self, group: int) -> None:
        bits, symmetric, k = self.scheme.bits, self.scheme.symmetric, self.shape[1]
        self.group = group
        kept_group = group if group <= GROUPS[0] else next((each for each in GROUPS if group % each == 0), group)
        in_order = not self.scheme.ordered and k % group == 0
        possible = [(kept, unit) for kept, unit in _KERNELS if kept >= bits]
        whole = [(kept, kept_group, 0 if in_order else k) for kept, unit in possible if kept_group % unit == 0]
        filled = [(kept, unit, k) for kept, unit in possible if kept * -(-group // unit) * unit < _PLAIN_BITS * group]
        for kept, width, columns in (whole + filled)[:1]:
            zero = 128 if kept == 8 else (1 << bits - 1) * symmetric
            self.form = Format(kept, width, zero, minima=not symmetric, gathered=columns, filled=group if columns else 0)

    def numbers(self, read: Read, rows: slice) -> Tensor:
        if self.form is not None and not self.form.gathered:
            return super().numbers(read, rows)
        matrix, group_of = self.codes(read, rows), self._group_of_columns(read)
        numbers = (matrix.codes.float() - matrix.format.zero) * matrix.scales[:, group_of]
        return numbers if matrix.minima is None else numbers + matrix.minima[:, group_of]

    def part(self, read: Read, rows: slice, columns: slice) -> GroupQuantized:
        form = self._form_of(columns)
        if not form.gathered:
            return super().part(read, rows, columns)
        matrix, group_of = self.codes(read, rows), self._group_of_columns(read)[columns]
        return self._for_kernels(gathered(matrix.codes[:, columns], matrix.scales, matrix.minima, group_of, form), form)

    def _group_of_columns(self, read: Read) -> Tensor:
        """Returns the group of each column [K] int64. Raises WeightError for one that is not there."""
        in_order = torch.arange(self.shape[1]) // self.group
        if not self.scheme.ordered or self._order is None:
            return in_order
        found = read(self._order, ()).long()
        if not bool(((found >= 0) & (found <= in_order[-1])).all()):
            raise WeightError(f"checkpoint: {self.module}.{self._order} names groups that it does not have")
        return found

    def _matrix(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> GroupQuantized:
        """codes [R, K] uint8 from 0 on; scales, zeros [R, groups], zeros None where the code in the middle is 0 everywhere."""
        kept = 8 if self.form is None else self.form.bits
        middle = 1 << self.scheme.bits - 1
        if kept == 8:
            codes = codes + (128 - middle)
            zero = 128
        else:
            zero = 0 if zeros is not None else middle
        scales = scales.float()
        minima = None if zeros is None else -scales * (zeros.float() - (middle if kept == 8 else 0))
        return GroupQuantized(codes, scales, Format(kept, self.group, zero, minima=minima is not None), minima)


def _factor_of(scales: Tensor) -> float:
    """Returns the power of two that scales are divided by for float16: 1 unless even the largest would be rounded coarsely."""
    top = float(scales.abs().max())
    return 2.0 ** math.floor(math.log2(top)) if 0 < top < _COARSE else 1.0


def unpack(words: Tensor, bits: int) -> Tensor:
    """Reads codes that lie one behind the other in the bits of a row, the lowest first: [R, W] int32 -> [R, 32 W / bits] uint8."""
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw
    if bits in (2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (raw[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)
    # 32 codes fill as many words as they have bits; code after code, so that little memory is needed on the way.
    grouped = words.contiguous().view(words.shape[0], -1, bits)
    codes = torch.empty(*grouped.shape[:2], 32, dtype=torch.uint8)
    for number in range(32):
        first, offset = divmod(number * bits, 32)
        code = grouped[:, :, first] >> offset
        if offset > 32 - bits:
            code = code & (1 << 32 - offset) - 1 | grouped[:, :, first + 1] << 32 - offset
        codes[:, :, number] = code & (1 << bits) - 1
    return codes.flatten(1)


def nibbles(raw: Tensor) -> Tensor:
    """[R, C] uint8 -> [R, 2 C]: the low four bits of each byte, then its high ones."""
    return torch.stack([raw & 15, raw >> 4], 2).flatten(1)
