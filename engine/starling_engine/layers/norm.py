"""RMSNorm, which also adds the residual."""

from typing import Protocol

import torch
from torch.nn import functional as F

from starling_engine.layers.elementwise import elementwise_kernels
from starling_engine.native import ops
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class NormKernels(Protocol):
    """A module of kernels. `native.reference` defines what they compute."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None: ...


class RMSNorm:
    """y = x / rms(x) * weight, in fp32 inside (arXiv 1910.07467)."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._name = name
        self._eps = eps
        self._size = (size,)
        self._kernels = _kernels(dtype, device)
        self.forward = self._fused if self._kernels is not None else self._torch
        """(x, residual) -> (norm of their sum, the sum), all [T, size]. With a residual of None nothing is added.

        Both inputs may be overwritten, so the caller must use the results only.
        """

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {f"{self._name}.weight": copy_slot(self.weight)}

    def _torch(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x.add_(residual)
        return F.rms_norm(total, self._size, self.weight, self._eps), total

    def _fused(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._kernels is not None
        if residual is None:
            out = torch.empty_like(x)
            self._kernels.rms_norm(x, self.weight, self._eps, out)
            return out, x
        self._kernels.add_rms_norm(x, residual, self.weight, self._eps, x)
        return x, residual


def _kernels(dtype: torch.dtype, device: torch.device) -> NormKernels | None:
    """Returns the kernels; None for torch's own."""
    match elementwise_kernels(dtype, device):
        case "triton":
            from starling_engine.kernels import norm

            return norm
        case "native":
            return ops
    return None
