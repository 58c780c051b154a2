"""RMSNorm, with the residual's addition in the same call."""

import torch
from torch.nn import functional as F

from starling_engine.weights.slot import Slot, copy_slot


class RMSNorm:
    """y = x / rms(x) * weight, in fp32 inside (arXiv 1910.07467)."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._name = name
        self._eps = eps
        self._size = (size,)

    def slots(self) -> dict[str, Slot]:
        return {f"{self._name}.weight": copy_slot(self.weight)}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (norm of their sum, the sum). Either input may be overwritten."""
        total = x if residual is None else x.add_(residual)
        return F.rms_norm(total, self._size, self.weight, self._eps), total
