"""Floats in 8 and 4 bits in a checkpoint: FP8, MXFP8, NVFP4, MXFP4."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import WeightScheme
from starling_engine.native.group_quantized import E2M1, GROUPS, Format, GroupQuantized
from starling_engine.weights.quantized.integers import scales_in, scales_of
from starling_engine.weights.quantized.matrix import CodedMatrix, Endings, Read, nibbles
from starling_engine.weights.source import Index

_SCALES = ("weight_scale_inv", "weight_scale")
"""Endings of what FP8 numbers are multiplied by; DeepSeek's means the scale, too, whatever its name says."""

_INPUT_SCALES = ("input_scale", "activation_scale")
"""Endings of what rows of x are divided by before they are rounded."""

MX_GROUP = 32
"""Columns that share a scale in MXFP4."""

EXPONENTS = "F8_E8M0"
"""Type of scales that are powers of two, where a checkpoint does not have them as bytes."""

_NOT_A_NUMBER = 0x7F
"""The code of it, apart from its sign."""


class Float8Matrix(CodedMatrix):
    """weight [N, K] float8_e4m3fn, with one scale, or one for each row, group of columns, or block of rows and columns.

    Where a static scale of x is missing, each token has its own.
    """

    _input: str | None = None

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        n, k = self._shape_of("weight", 2)
        self._scale = next((each for each in _SCALES if each in tensors), _SCALES[-1])
        shape = self._shape_of(self._scale)
        rows, columns = scheme.block or (1, 1)
        if scheme.block is not None:
            self._check(self._scale, (-(-n // rows), -(-k // columns)))
        elif math.prod(shape) != 1 and (len(shape) > 2 or shape[0] != n or (len(shape) == 2 and k % shape[1])):
            raise WeightError(
                f"checkpoint: {module}.{self._scale} {list(shape)} has the wrong shape (expected one scale, or some for each row)"
            )
        self._describe("float8_e4m3fn", (n, k), 8, 0)
        self._width = min(columns, k) if scheme.block is not None else k // scales_in(shape)
        group = next((each for each in GROUPS[:-1] if k % each == 0 and self._width % each == 0), None)
        rounding = scheme.rounding
        if rounding == "static":
            self._input = next((each for each in _INPUT_SCALES if each in tensors), None)
            if self._input is None:
                rounding = "token"
            elif math.prod(self._shape_of(self._input)) != 1:
                raise WeightError(f"checkpoint: {module}.{self._input} has the wrong shape (expected one scale)")
        if group is not None:
            self.form = Format(8, group, floats=True, by_row=self._width == k, block_rows=rows, rounding=rounding)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        assert self.form is not None, "its groups are too small"
        codes = read("weight", (rows,)).contiguous().view(torch.uint8)
        if bool((codes & _NOT_A_NUMBER == _NOT_A_NUMBER).any()):
            raise WeightError(f"checkpoint: {self.module}.weight holds what is not a number")
        n, k = codes.shape
        starts = torch.arange(0, k, self.form.group)
        found = GroupQuantized(codes, self._scales(read, rows, n)[:, starts // self._width].contiguous(), self.form)
        return found if self._input is None else replace(found, input_scale=read(self._input, ()).float().reshape(()))

    def numbers(self, read: Read, rows: slice) -> Tensor:
        numbers = read("weight", (rows,)).float()
        n, k = numbers.shape
        return numbers * self._scales(read, rows, n).repeat_interleave(self._width, 1)[:, :k]

    def _scales(self, read: Read, rows: slice, n: int) -> Tensor:
        """Returns the scales of each of some rows, [n, groups of `_width` columns]."""
        if self.scheme.block is None:
            return _as_float(scales_of(read, self._scale, rows, n))
        start = rows.indices(self.shape[0])[0]
        return _as_float(read(self._scale, ()))[torch.arange(start, start + n) // self.scheme.block[0]]


class Float8Expert(Float8Matrix):
    """One matrix of an expert in transformers' form of FP8, in which tensors hold those of all experts of a layer.

    gate_up_proj [E, 2 N, K], gates first, and down_proj [E, N, K] float8_e4m3fn. Each has scales (_scale_inv): [E, 1, 1], or one
    for each block of an expert's rows and columns, which may have rows of gate and of up. It may have a static one of x
    (_activation_scale), one in all or E.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme, expert: int, projection: str) -> None:
        self.module, self.tensors = module, tensors
        self._tensor = "down_proj" if projection == "down_proj" else "gate_up_proj"
        experts, n, k = self._shape_of(self._tensor, 3)
        parts = 1 if projection == "down_proj" else 2
        if n % parts:
            raise WeightError(f"checkpoint: {module}.{self._tensor} {[experts, n, k]} has no half of rows that are gates")
        rows, columns = scheme.block or (n, k)
        self._check(f"{self._tensor}_scale_inv", (experts, -(-n // rows), -(-k // columns)))
        weight, scale = (tensors[f"{self._tensor}{each}"] for each in ("", "_scale_inv"))
        of_one = () if scheme.block is None else (-(-(n // parts) // rows), -(-k // columns))
        own = {"weight": replace(weight, shape=(n // parts, k)), "weight_scale_inv": replace(scale, shape=of_one)}
        if (inputs := f"{self._tensor}_activation_scale") in tensors:
            self._check(inputs, (), (1,), (experts,), (experts, 1, 1))
            own["activation_scale"] = replace(tensors[inputs], shape=())
        super().__init__(module, own, scheme)
        self._expert, self._first = expert, n // parts if projection == "up_proj" else 0
        if self.form is not None and scheme.block is not None and parts > 1:  # one form for both, which kernels want
            self.form = replace(self.form, block_rows=math.gcd(n // parts, rows))

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        return super().codes(self._own(read), rows)

    def numbers(self, read: Read, rows: slice) -> Tensor:
        return super().numbers(self._own(read), rows)

    def _scales(self, read: Read, rows: slice, n: int) -> Tensor:
        if self.scheme.block is None:
            return super()._scales(read, rows, n)
        start = self._first + rows.indices(self.shape[0])[0]
        return _as_float(read("weight_scale_inv", ()))[torch.arange(start, start + n) // self.scheme.block[0]]

    def _own(self, read: Read) -> Read:
        """Returns what reads this matrix and its scales, by the endings of one that has tensors to itself."""

        def of_one(ending: str, index: Index) -> Tensor:
            if ending == "weight":
                (rows,) = index
                assert isinstance(rows, slice), "a matrix is not taken by single rows"
                start, stop, _ = rows.indices(self.shape[0])
                return read(self._tensor, (self._expert, slice(self._first + start, self._first + stop)))
            name = f"{self._tensor}_{ending.removeprefix('weight_')}"
            if ending == "weight_scale_inv" and self.scheme.block is not None:
                return read(name, (self._expert,))
            found = read(name, ()).flatten()
            return found[self._expert if len(found) > 1 else 0]

        return of_one


class Float4Matrix(CodedMatrix):
    """Floats in 4 bits (e2m1), two in a byte, with a scale for each 16 (NVFP4) or 32 columns (MXFP4).

    weight_packed, or weight of ModelOpt and of DeepSeek-V4, [N, K / 2] of bytes; weight_scale [N, G] float8_e4m3fn, or exponents
    (MXFP4).
    NVFP4 has one scale more: weight_global_scale divides, weight_scale_2 of ModelOpt multiplies.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        self._codes = "weight_packed" if "weight_packed" in tensors else "weight"
        n, half = self._shape_of(self._codes, 2)
        groups = self._shape_of("weight_scale", 2)[1]
        self._check("weight_scale", (n, groups))
        for ending in ("weight_scale_2", "weight_global_scale"):
            if ending in tensors:
                self._check(ending, (), (1,))
        is_mx = tensors["weight_scale"].dtype in ("U8", EXPONENTS)
        self._describe("mxfp4" if is_mx else "nvfp4", (n, 2 * half), 4, groups)
        self._group = self._group_of("weight_scale", groups)
        if self._group % 16 == 0:
            self.form = Format(4, self._group, table=E2M1)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        codes = nibbles(read(self._codes, (rows,)).view(torch.uint8))
        scales = _as_float(read("weight_scale", (rows,))) / 2  # the table has numbers twice as large
        if "weight_scale_2" in self.tensors:
            scales = scales * read("weight_scale_2", ()).float()
        elif "weight_global_scale" in self.tensors:
            scales = scales / read("weight_global_scale", ()).float()
        return GroupQuantized(codes, scales, Format(4, self._group, table=E2M1))


class Float4Expert(CodedMatrix):
    """One matrix of an expert in gpt-oss's form of MXFP4, in which tensors hold those of all experts of a layer.

    gate_up_proj_blocks, down_proj_blocks [E, N, K / 32, 16] uint8, two codes a byte, and exponents [E, N, K / 32] uint8 (_scales).
    Rows of gate and up take turns.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme, expert: int, projection: str) -> None:
        super().__init__(module, tensors, scheme)
        self._tensor = "down_proj" if projection == "down_proj" else "gate_up_proj"
        self._expert, self._first, self._turns = expert, int(projection == "up_proj"), 1 if projection == "down_proj" else 2
        experts, n, groups, half = self._shape_of(f"{self._tensor}_blocks", 4)
        if n % self._turns or half != MX_GROUP // 2:
            shape = [experts, n, groups, half]
            wanted = f"rows of gate and up, and {MX_GROUP // 2} bytes a group"
            raise WeightError(f"checkpoint: {module}.{self._tensor}_blocks {shape} has the wrong shape (expected {wanted})")
        self._check(f"{self._tensor}_scales", (experts, n, groups))
        self._describe("mxfp4", (n // self._turns, MX_GROUP * groups), 4, groups)
        self.form = Format(4, MX_GROUP, table=E2M1)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        start, stop, _ = rows.indices(self.shape[0])
        part = (self._expert, slice(start * self._turns + self._first, stop * self._turns, self._turns))
        blocks, exponents = (read(f"{self._tensor}_{each}", part) for each in ("blocks", "scales"))
        scales = _as_float(exponents) / 2  # the table has numbers twice as large
        return GroupQuantized(nibbles(blocks.flatten(1)), scales, Format(4, MX_GROUP, table=E2M1))


def _as_float(scales: Tensor) -> Tensor:
    """Reads exponents (e8m0) where scales are bytes."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
