"""Launches with codes, of Llama 3 8B's and Qwen3-30B-A3B's shapes, to be compiled in a process of their own."""

from dataclasses import replace

import torch
from starling_engine.kernels import grouped
from starling_engine.kernels.coded_weight import empty_codes
from starling_engine.kernels.gather_columns import gather_columns
from starling_engine.kernels.quantized_linear import quantized_linear
from starling_engine.native.group_quantized import Format

META = torch.device("meta")


def linear(rows: int, form: Format, dtype: torch.dtype) -> None:
    weight = empty_codes(1, 4096, 14336, form, META)
    minima = None if weight.minima is None else weight.minima[0]
    quantized_linear(
        torch.empty(rows, 14336, dtype=dtype, device=META),
        replace(weight, codes=weight.codes[0], scales=weight.scales[0], minima=minima),
    )


def gather() -> None:
    gather_columns(torch.empty(7, 14336, dtype=torch.bfloat16, device=META), torch.empty(14336, dtype=torch.int32, device=META))


def experts(tokens: int, form: Format, dtype: torch.dtype) -> None:
    x, slots = torch.empty(tokens, 2048, dtype=dtype, device=META), torch.empty(tokens, 8, dtype=torch.int64, device=META)
    gate_up, down = empty_codes(128, 1536, 2048, form, META), empty_codes(128, 2048, 768, form, META)
    tiles = grouped.tiles_for(tokens, 8, 128, dtype, coded=True)
    grouped.experts(x, slots, torch.empty(tokens, 8, device=META), gate_up, down, tiles)
