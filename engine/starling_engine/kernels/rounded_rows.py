"""Activations in FP8: rows of float8_e4m3fn with scales, and how they are made of numbers. Kernels are in `round_rows`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from starling_engine.model_config.quantization import ROUNDED_GROUP, Rounding
from starling_engine.native.group_quantized import FP8_LARGEST, NOTHING


@dataclass(frozen=True, slots=True)
class RowRounding:
    """A way to round rows. `scale` [] fp32 is that of all, where the kind is "static"."""

    kind: Rounding
    scale: Tensor | None = None

    @property
    def group(self) -> int:
        """Columns that share a scale; 0: all of a row."""
        return ROUNDED_GROUP if self.kind == "group" else 0

    def scales_of(self, columns: int) -> int:
        """Returns how many scales a row has."""
        return columns // ROUNDED_GROUP if self.group else 1


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Numbers that are codes [M, K] float8_e4m3fn times scales [M, 1 or K / 128] fp32; they were of `dtype`."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def numbers(self) -> Tensor:
        """Returns [M, K] in float32."""
        repeats = self.codes.shape[1] // self.scales.shape[1]
        return self.codes.float() * self.scales.repeat_interleave(repeats, 1)


def empty_rows(rows: int, columns: int, rounding: RowRounding, dtype: torch.dtype, device: torch.device) -> RoundedRows:
    assert not rounding.group or columns % rounding.group == 0, "a row is not whole groups"
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    return RoundedRows(codes, torch.empty(rows, rounding.scales_of(columns), dtype=torch.float32, device=device), dtype)


def rounded_in_torch(x: Tensor, rounding: RowRounding) -> RoundedRows:
    """Defines what kernels give for x [M, K].

    A scale is the largest number over 448, so that this is the largest code. Static ones may be too small: such numbers become 448.
    """
    wide = x.float()
    grouped = wide.unflatten(1, (rounding.scales_of(x.shape[1]), -1))
    if rounding.scale is None:
        scales = grouped.abs().amax(2).clamp_(min=NOTHING) / FP8_LARGEST
    else:
        scales = rounding.scale.expand(len(x), 1)
    codes = (grouped / scales[:, :, None]).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
    return RoundedRows(codes.flatten(1), scales.contiguous(), x.dtype)
