"""Launches with codes, of Llama 3 8B's and Qwen3-30B-A3B's shapes, to be compiled in a process of their own."""

from dataclasses import replace

import torch
from starling_engine.kernels import grouped
from starling_engine.kernels.activation import silu_mul_rounded
from starling_engine.kernels.coded_weight import empty_codes
from starling_engine.kernels.fp8 import kept_rows
from starling_engine.kernels.gather_columns import gather_columns, gather_columns_of_slots
from starling_engine.kernels.norm import rms_norm_rounded
from starling_engine.kernels.quantized_linear import quantized_linear
from starling_engine.kernels.round_rows import round_rows
from starling_engine.kernels.rounded_rows import RowRounding
from starling_engine.kernels.scaled_linear import _by_triton
from starling_engine.kernels.scaled_weight import empty_scaled
from starling_engine.model_config.quantization import Rounding
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
    """Gathers for a matrix, and for eight experts of each of seven tokens."""
    x = torch.empty(7, 14336, dtype=torch.bfloat16, device=META)
    gather_columns(x, torch.empty(14336, dtype=torch.int32, device=META))
    slots = torch.empty(56, dtype=torch.int64, device=META)
    gather_columns_of_slots(x, torch.empty(128, 2048, dtype=torch.int32, device=META), slots, 8)


def experts(tokens: int, form: Format, dtype: torch.dtype) -> None:
    x, slots = torch.empty(tokens, 2048, dtype=dtype, device=META), torch.empty(tokens, 8, dtype=torch.int64, device=META)
    gate_up, down = empty_codes(128, 1536, 2048, form, META), empty_codes(128, 2048, 768, form, META)
    tiles = grouped.tiles_for(tokens, 8, 128, dtype, coded=True)
    grouped.experts(x, slots, torch.empty(tokens, 8, device=META), gate_up, down, tiles)


def scaled(rows: int, form: Format, dtype: torch.dtype = torch.bfloat16) -> None:
    """Rounds rows in a launch of their own, and multiplies them by Triton's kernel."""
    weight = empty_scaled(1, 4096, 14336, form, kept_rows(form), META)
    one = replace(weight, codes=weight.codes[0], scales=weight.scales[0])
    rounded = round_rows(torch.empty(rows, 14336, dtype=dtype, device=META), one.rounding)
    _by_triton(rounded, one, None, torch.empty(rows, 4096, dtype=dtype, device=META))


def rounding(kind: Rounding) -> None:
    """Norms of 4,096 columns and gates of 14,336."""
    x, how = torch.empty(7, 4096, dtype=torch.bfloat16, device=META), RowRounding(kind, STATIC if kind == "static" else None)
    rms_norm_rounded(x, torch.empty_like(x), x[0], 1e-6, how)
    silu_mul_rounded(torch.empty(7, 2 * 14336, dtype=torch.bfloat16, device=META), how)


STATIC = torch.empty((), device=META)


def scaled_experts(tokens: int, form: Format) -> None:
    x, slots = torch.empty(tokens, 2048, dtype=torch.bfloat16, device=META), torch.empty(tokens, 8, dtype=torch.int64, device=META)
    gate_up, down = (empty_scaled(128, n, k, form, kept_rows(form), META) for n, k in ((1536, 2048), (2048, 768)))
    tiles = grouped.scaled_tiles_for(tokens, 8, 128)
    grouped.experts(x, slots, torch.empty(tokens, 8, device=META), gate_up, down, tiles)
