"""The norms of a decoder, which also add the residual."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional as F

from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import encoder_ops, ops
from starling_engine.parallel.rank_part import RankPart, Rows, whole
from starling_engine.weights.weight_slot import WeightSlot, copy_slot, plus_one_slot, scaled_slot


class NormKernels(Protocol):
    """A module of kernels. `native.reference` defines what they compute."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None: ...


Normalise = Callable[[Rows, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""(x, residual) -> (norm of their sum, the sum), all [T, size]. With a residual of None nothing is added.

A rank's part of x is summed first, by the norm's own launch where ranks can. Both inputs may be overwritten, so the caller must use
the results only.
"""


class Norm(Protocol):
    """A norm of hidden states."""

    @property
    def forward(self) -> Normalise: ...

    def weight_slots(self) -> dict[str, WeightSlot]: ...


class RMSNorm:
    """y = x / rms(x) * weight, in fp32 inside, rounded before the weight (arXiv 1910.07467). See `Normalise`.

    With a `wide` weight, in fp32, it is rounded once (Gemma 4). With `plus_one` it is multiplied by 1 + weight, and rounded once
    (Gemma). That sum is kept in fp32: near 1 the steps of bfloat16 are 1/128. With a
    `scale` the weight is multiplied by it, and is the tensor `name`, which is no module then.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        wide: bool = False,
        plus_one: bool = False,
        scale: float | None = None,
    ) -> None:
        self.weight = torch.empty(size, dtype=torch.float32 if wide or plus_one else dtype, device=device)
        self._name = name
        self._eps = eps
        self._size = (size,)
        self._plus_one = plus_one
        self._scale = scale
        self._kernels = _kernels(dtype, device)
        self.rounds = elementwise_kernels(dtype, device) == "triton"
        """Says whether norms are Triton's: there is `forward_rounded`."""
        self.forward: Normalise = self._fused if self._kernels is not None else self._torch

    @property
    def of_rows(self) -> RowNorm:
        """The norm as a part of a product."""
        return RowNorm(self.weight, self._eps)

    def forward_rounded(
        self, x: Rows, residual: torch.Tensor | None, rounding: RowRounding
    ) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
        """Does as `forward`, and rounds the norm to FP8."""
        from starling_engine.kernels.norm import rms_norm_rounded

        if isinstance(x, RankPart) and residual is not None:
            normed = x.normed(residual, self.of_rows, rounding)
            if normed is not None:
                return normed, residual
        x = whole(x)
        return rms_norm_rounded(x, residual, self.weight, self._eps, rounding), x if residual is None else residual

    def weight_slots(self) -> dict[str, WeightSlot]:
        if self._scale is not None:
            return {self._name: scaled_slot(self.weight, self._scale)}
        return {f"{self._name}.weight": plus_one_slot(self.weight) if self._plus_one else copy_slot(self.weight)}

    def _torch(self, x: Rows, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = whole(x)
        total = x if residual is None else x.add_(residual)
        return F.rms_norm(total.to(self.weight.dtype), self._size, self.weight, self._eps).to(x.dtype), total

    def _fused(self, x: Rows, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._kernels is not None
        if isinstance(x, RankPart) and residual is not None and self.rounds:
            normed = x.normed(residual, self.of_rows, None)
            if isinstance(normed, torch.Tensor):
                return normed, residual
        x = whole(x)
        if residual is None:
            out = torch.empty_like(x)
            self._kernels.rms_norm(x, self.weight, self._eps, out)
            return out, x
        self._kernels.add_rms_norm(x, residual, self.weight, self._eps, x)
        return x, residual


class LayerNorm:
    """y = (x - mean(x)) / std(x) * weight, in fp32, rounded once (Cohere). See `Normalise`.

    With `bias` one is added. With `plus_one` it is multiplied by 1 + weight, which is rounded to the weights' dtype (Nemotron).
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
        plus_one: bool = False,
    ) -> None:
        self._weight = torch.empty(size, dtype=dtype, device=device)
        self._bias = torch.empty_like(self._weight) if bias else None
        self._name = name
        self._eps = eps
        self._plus_one = plus_one
        self.forward: Normalise = self._fused if encoder_ops.are_fastest(dtype, device) else self._torch

    def _fused(self, x: Rows, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = whole(x).contiguous()
        out = torch.empty_like(x) if residual is None else x
        encoder_ops.layer_norm(x, residual, self._weight, self._bias, self._eps, out)
        return out, x if residual is None else residual

    def _torch(self, x: Rows, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x = whole(x)
        total = x if residual is None else x.add_(residual)
        bias = None if self._bias is None else self._bias.float()
        return F.layer_norm(total.float(), self._weight.shape, self._weight.float(), bias, self._eps).to(x.dtype), total

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {f"{self._name}.weight": plus_one_slot(self._weight) if self._plus_one else copy_slot(self._weight)}
        return slots if self._bias is None else {**slots, f"{self._name}.bias": copy_slot(self._bias)}


NORMS: dict[str, Callable[[str, int, float, torch.dtype, torch.device], Norm]] = {
    "weight": RMSNorm,
    "wide weight": partial(RMSNorm, wide=True),
    "one plus weight": partial(RMSNorm, plus_one=True),
    "layer": LayerNorm,
    "biased layer": partial(LayerNorm, bias=True),
    "biased layer, one plus weight": partial(LayerNorm, bias=True, plus_one=True),
}
"""Norms by `Traits.norm`."""


def _kernels(dtype: torch.dtype, device: torch.device) -> NormKernels | None:
    """Returns the kernels; None for torch's own."""
    match elementwise_kernels(dtype, device):
        case "triton":
            from starling_engine.kernels import norm

            return norm
        case "native":
            return ops
    return None
