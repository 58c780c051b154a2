"""Weights that bitsandbytes has quantized: 4 bits by a table (nf4, fp4), and 8 bits by rows (LLM.int8, arXiv 2208.07339)."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import WeightScheme
from starling_engine.native.group_quantized import GroupQuantized
from starling_engine.weights.quantized.matrix import Endings, IntegerMatrix, QuantizedMatrix, Read

STATE = "weight.quant_state.bitsandbytes__"
"""Beginning of the ending of a tensor that is JSON in bytes."""


class TableMatrix(QuantizedMatrix):
    """weight [N K / 2, 1] uint8: codes of all rows, the high four bits of a byte first, with a scale for some 64 of them.

    The scales ("absmax") may be codes of a table, too, with scales for some 256 of them.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme, state: Tensor) -> None:
        super().__init__(module, tensors, scheme)
        try:
            self._state: Mapping[str, Any] = json.loads(bytes(state.tolist()))
            n, k = map(int, self._state["shape"])
            self._block = int(self._state["blocksize"])
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(f"checkpoint: {module} has a quant_state that cannot be read: {error!r}") from error
        if min(n, k, self._block) < 1 or math.prod(self._shape_of("weight")) != -(-n * k // 2):
            raise WeightError(f"checkpoint: {module}.weight does not hold {n} x {k} codes of 4 bits, as its quant_state says")
        self._check("weight.absmax", (-(-n * k // self._block),))
        self._check("weight.quant_map", (16,))
        self._describe(str(self._state.get("quant_type", "4 bits")), (n, k), 4, 0)

    def numbers(self, read: Read, rows: slice) -> Tensor:
        n, k = self.shape
        raw = read("weight", ()).flatten()
        codes = torch.stack([raw >> 4, raw & 15], 1).flatten()[: n * k]
        values = read("weight.quant_map", ()).float()[codes.long()]
        scales = self._scales(read).repeat_interleave(self._block)[: n * k]
        return (values * scales).view(n, k)[rows]

    def _scales(self, read: Read) -> Tensor:
        scales = read("weight.absmax", ())
        if "weight.nested_absmax" not in self.tensors:
            return scales.float()
        nested, table = read("weight.nested_absmax", ()).float(), read("weight.nested_quant_map", ()).float()
        each = nested.repeat_interleave(int(self._state["nested_blocksize"]))[: scales.shape[0]]
        return table[scales.long()] * each + float(self._state["nested_offset"])


class RowsMatrix(IntegerMatrix):
    """weight [N, K] int8, and SCB [N]: 127 times the scale of each row."""

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme) -> None:
        super().__init__(module, tensors, scheme)
        n, k = self._shape_of("weight")
        self._describe("int8 of bitsandbytes", (n, k), 8, 1)
        self._check("SCB", (n,))
        self._set_form(k)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        codes = read("weight", (rows,)).contiguous().view(torch.uint8) + 128
        return self._matrix(codes, read("SCB", ())[rows, None] / 127, None)
