"""Weights that bitsandbytes has quantized: 4 bits by a table (nf4, fp4), and 8 bits by rows (LLM.int8, arXiv 2208.07339)."""

import json
import math

import torch
from torch import Tensor

from starling_engine.errors import WeightError
from starling_engine.model_config.quantization import WeightScheme
from starling_engine.native.group_quantized import AT_ONCE, GROUPS, Format, GroupQuantized
from starling_engine.weights.quantized.matrix import CodedMatrix, Endings, IntegerMatrix, Read

STATE = "weight.quant_state.bitsandbytes__"
"""Beginning of the ending of a tensor that is JSON in bytes."""
_MAX_STATE_BYTES = 1 << 16
_WHOLE_TABLES = range(64, 128)
"""The largest number of a table becomes one of these, for kernels take whole numbers within 127."""


class TableMatrix(CodedMatrix):
    """weight [N K / 2, 1] uint8: codes of all rows, the high four bits of a byte first, with a scale for some 64 of them.

    The scales ("absmax") may be codes of a table, too, with scales for some 256 of them. Kernels have the table in whole numbers.
    """

    def __init__(self, module: str, tensors: Endings, scheme: WeightScheme, read: Read) -> None:
        """Reads the state and the table, without which headers tell nothing."""
        super().__init__(module, tensors, scheme)
        state = next((ending for ending in tensors if ending.startswith(STATE)), None)
        if state is None:
            raise WeightError(f"checkpoint: {module}.{STATE}nf4 is missing")
        nested = "weight.nested_absmax" in tensors
        if self._shape_of("weight") and tensors["weight"].dtype != "U8":
            raise WeightError(f"checkpoint: {module}.weight is {tensors['weight'].dtype} (expected U8)")
        if tensors[state].dtype != "U8" or math.prod(tensors[state].shape) > _MAX_STATE_BYTES:
            raise WeightError(f"checkpoint: {module}.{state} is no U8 of at most {_MAX_STATE_BYTES} bytes")
        try:
            found = json.loads(bytes(read(state, ()).tolist()))
            n, k = map(int, found["shape"])
            self._block = min(int(found["blocksize"]), n * k)
            self._nested_block, self._offset = (
                int(found["nested_blocksize"]) if nested else 1,
                float(found["nested_offset"]) if nested else 0.0,
            )
            label = str(found["quant_type"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise WeightError(f"checkpoint: {module} has a quant_state that cannot be read: {error!r}") from error
        if min(n, k, self._block, self._nested_block) < 1 or math.prod(self._shape_of("weight")) != -(-n * k // 2):
            raise WeightError(f"checkpoint: {module}.weight does not hold {n} x {k} codes of 4 bits, as its quant_state says")
        blocks = -(-n * k // self._block)
        self._check("weight.absmax", (blocks,))
        self._check("weight.quant_map", (16,))
        if nested:
            self._check("weight.nested_absmax", (-(-blocks // self._nested_block),))
            self._check("weight.nested_quant_map", (256,))
        self._describe(label, (n, k), 4, 0)
        table = read("weight.quant_map", ()).float()
        group = next((each for each in GROUPS if k % each == 0 and self._block % each == 0), None)
        if group is not None and bool(table.isfinite().all()) and bool(table.any()):
            whole, self._one = _in_whole_numbers(table)
            self.form = Format(4, group, table=whole)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        assert self.form is not None, "its blocks are no groups"
        first, end, _ = rows.indices(self.shape[0])
        k = self.shape[1]
        pairs = read("weight", ()).flatten()[first * k // 2 : end * k // 2]
        codes = torch.stack([pairs >> 4, pairs & 15], 1).view(end - first, k)
        blocks = torch.arange(first * k, end * k, self.form.group) // self._block
        return GroupQuantized(codes, (self._scales(read)[blocks] * self._one).view(end - first, -1), self.form)

    def numbers(self, read: Read, rows: slice) -> Tensor:
        n, k = self.shape
        raw, table, scales = read("weight", ()).flatten(), read("weight.quant_map", ()).float(), self._scales(read)
        first, end, _ = rows.indices(n)
        out = torch.empty((end - first) * k)
        for start in range(first * k, end * k, AT_ONCE):
            at = torch.arange(start, min(end * k, start + AT_ONCE), dtype=torch.int32 if n * k < 1 << 31 else torch.int64)
            codes = raw[at // 2] >> 4 * (1 - at % 2).to(torch.uint8) & 15
            out[start - first * k :][: len(at)] = table[codes.int()] * scales[at // self._block]
        return out.view(end - first, k)

    def _scales(self, read: Read) -> Tensor:
        """Returns the scale of each block of codes."""
        scales = read("weight.absmax", ())
        if "weight.nested_absmax" not in self.tensors:
            return scales.float()
        nested, table = read("weight.nested_absmax", ()).float(), read("weight.nested_quant_map", ()).float()
        return table[scales.int()] * nested[torch.arange(len(scales)) // self._nested_block] + self._offset


def _in_whole_numbers(table: Tensor) -> tuple[tuple[int, ...], float]:
    """Returns a table [16] in whole numbers, and what 1 stands for there. Each is wrong by 1/254 of the largest at most."""
    top = table.abs().max()
    tables = table / top * torch.tensor(_WHOLE_TABLES)[:, None]
    errors = ((tables - tables.round()).abs().amax(1) / torch.tensor(_WHOLE_TABLES)).argmin()
    return tuple(map(int, tables[errors].round().tolist())), top.item() / _WHOLE_TABLES[int(errors)]


class RowsMatrix(IntegerMatrix):
    """weight [N, K] int8, and SCB [N]: 127 times the scale of each row."""

    def __init__(self, module: str, tensors: Endings, _: WeightScheme) -> None:
        super().__init__(module, tensors, WeightScheme(8))
        n, k = self._shape_of("weight", 2)
        self._describe("int8 of bitsandbytes", (n, k), 8, 1)
        self._check("SCB", (n,))
        self._set_form(k)

    def codes(self, read: Read, rows: slice) -> GroupQuantized:
        codes = read("weight", (rows,)).contiguous().view(torch.uint8) + 128
        return self._matrix(codes, read("SCB", ())[rows, None] / 127, None)
