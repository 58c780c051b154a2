"""Linear methods for quantized weights: of a checkpoint, or quantized while they are loaded."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.layers.activation import silu_and_mul
from starling_engine.layers.linear import LinearPart, LinearShape
from starling_engine.layers.linear_dense import StackedMethod, StackedWeights
from starling_engine.layers.quantized_kernels import QuantizedKernels
from starling_engine.native.group_quantized import FP8, INT4, Format, GroupQuantized, places_in, quantize, stacked

ONLINE: dict[str, Format] = {"int8": Format(8, group=128, zero=128), "int4": INT4, "fp8": FP8}
"""Formats in which weights are kept, by `EngineArgs.quantization`; groups are cut where columns ask for it."""


class OnlineQuantizedLinear(StackedMethod):
    """Keeps W in groups of columns with a scale each. Kernels may round rows of x: on a CPU where W is whole numbers."""

    _weight: Any
    """Packed as the kernels have it."""
    _bias: torch.Tensor | None

    def __init__(self, name: str, form: Format, kernels: QuantizedKernels) -> None:
        self.name = name
        self._format = form
        self._kernels = kernels

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        self._dtype, size = dtype, self._kernels.element_bytes(self._format)
        return [
            replace(part, element_bytes=size) if part.name == "weight" else part for part in super().create(shape, dtype, device)
        ]

    def store(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = self._kernels.pack(quantize(weight, self._format), self._shape.gated), bias

    def row_rounding(self) -> RowRounding | None:
        return self._kernels.rounding(self._weight)

    def rounds_gates(self) -> bool:
        return self._shape.gated and self._kernels.gate_rounded is not None

    def apply_gated(self, x: torch.Tensor | RoundedRows, to: RowRounding) -> RoundedRows:
        assert self._kernels.gate_rounded is not None
        return self._kernels.gate_rounded(self._kernels.linear(x, self._weight, self._bias, self._dtype, None), to)

    def apply(self, x: torch.Tensor | RoundedRows, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._shape.gated and not self._kernels.gates:
            return self._finished(self._kernels.linear(x, self._weight, self._bias, self._dtype, None), out_dtype)
        return self._kernels.linear(x, self._weight, self._bias, out_dtype or self._dtype, None)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return self._kernels.lookup(ids, self._weight)


class QuantizedLinear:
    """Keeps the codes of a checkpoint. Modules of one format are one matrix; others, of one layer, are matrices side by side.

    Modules whose columns lie in an order of their own are one matrix where they have one order.
    """

    name = "quantized"

    def __init__(self, forms: Sequence[Format], kernels: QuantizedKernels) -> None:
        """`forms` are those of the modules."""
        self._forms = list(forms)
        self._kernels = kernels
        self._matrices: list[GroupQuantized | None] = [None] * len(self._forms)
        self._pieces: list[_Piece] = []

    def create(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> list[LinearPart]:
        # The kernel's gate takes blocks of eight rows of two matrices of one format.
        self._gated = self._kernels.gates and shape.gated and len(set(self._forms)) == 1 and shape.out_size % 16 == 0
        self._dtype, self._device = dtype, device
        self._activation = silu_and_mul(dtype, device) if shape.gated else None
        self._staged = StackedWeights(shape, dtype, device)
        return [
            replace(part, element_bytes=self._kernels.element_bytes(self._forms[part.module]), codes=True)
            if part.name == "weight"
            else part
            for part in self._staged.parts()
        ]

    def load_part(self, part: LinearPart, tensor: torch.Tensor) -> None:
        self._staged.load(part, tensor)

    def load_codes(self, part: LinearPart, matrix: GroupQuantized) -> None:
        # In float16, rows would lose what scales gain.
        self._matrices[part.module] = matrix.plain if self._dtype == torch.float16 else matrix

    def finish(self) -> None:
        bias, row = self._staged.bias, 0
        alike = [list(found) for _, found in groupby((each for each in self._matrices if each is not None), _layout)]
        self._gated = self._gated and len(alike) == 1
        for found in alike:
            order, matrix = found[0].order, stacked([each.in_order for each in found])
            rows = slice(row, row := row + matrix.codes.shape[0])
            self._pieces.append(
                _Piece(
                    self._kernels.pack(matrix, self._gated),
                    None if bias is None else bias[rows],
                    None if order is None else order.to(self._device),
                    None if order is None else places_in(order).to(self._device),
                    matrix.factor,
                )
            )
        self._matrices.clear()
        self._staged.bias = None

    def row_rounding(self) -> RowRounding | None:
        return self._kernels.rounding(self._pieces[0].weight) if len(self._pieces) == 1 else None

    def rounds_gates(self) -> bool:
        return self._activation is not None and self._kernels.gate_rounded is not None

    def apply_gated(self, x: torch.Tensor | RoundedRows, to: RowRounding) -> RoundedRows:
        assert self._kernels.gate_rounded is not None
        return self._kernels.gate_rounded(self._product(x, self._dtype), to)

    def apply(self, x: torch.Tensor | RoundedRows, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        out = self._product(x, out_dtype or self._dtype)
        return out if self._gated or self._activation is None else self._activation(out)

    def _product(self, x: torch.Tensor | RoundedRows, dtype: torch.dtype) -> torch.Tensor:
        if len(self._pieces) == 1 and self._pieces[0].order is None and self._pieces[0].factor == 1:
            (piece,) = self._pieces
            return self._kernels.linear(x, piece.weight, piece.bias, dtype, None)
        assert isinstance(x, torch.Tensor), "rows of several matrices are not rounded before"
        widths = [self._kernels.width(piece.weight) for piece in self._pieces]
        out, column = torch.empty(x.shape[0], sum(widths), dtype=dtype, device=x.device), 0
        for piece, width in zip(self._pieces, widths, strict=True):
            rows = x if piece.order is None else self._kernels.gather(x, piece.order)
            rows = rows if piece.factor == 1 else rows * piece.factor
            self._kernels.linear(rows, piece.weight, piece.bias, dtype, out[:, column : column + width])
            column += width
        return out

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        (piece,) = self._pieces
        rows = self._kernels.lookup(ids, piece.weight)
        rows = rows if piece.places is None else self._kernels.gather(rows, piece.places)
        return rows if piece.factor == 1 else rows * piece.factor


class _Piece(NamedTuple):
    """A matrix in the kernels' form, its bias, and the factor of x.

    Where its columns are not in x's order: their order, and the places of x's.
    """

    weight: Any
    bias: torch.Tensor | None
    order: torch.Tensor | None
    places: torch.Tensor | None
    factor: float


def _layout(matrix: GroupQuantized) -> tuple[Format, float, bytes | None]:
    """Returns what matrices have in common that can be one."""
    return matrix.format, matrix.factor, None if matrix.order is None else matrix.order.numpy().tobytes()
