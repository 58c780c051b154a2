"""Experts as plain tensors and torch's own matrix products. Works for every dtype on every device."""

import torch
from torch.nn import functional as F

from starling_engine.layers.activation import silu_and_mul
from starling_engine.layers.experts import ExpertPart, ExpertsShape, group_by_slot, plain_parts


class DenseExperts:
    """All slots' gates and ups in one tensor [S, 2 I, H], their downs in another [S, H, I].

    One product after another, of the experts only that this step's tokens go to.
    """

    name = "dense"
    _gate_up: torch.Tensor | None = None
    _down: torch.Tensor | None = None

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._gate = silu_and_mul(dtype, device)
        return plain_parts(shape)

    def load_shard(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        self._place(slot, part).copy_(tensor)

    def release(self, slot: int) -> None:
        """Its memory is kept for the next one."""

    def apply(self, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        groups = group_by_slot(slots, self._shape.slots)
        starts, weights = groups.starts.tolist(), weights.flatten()[groups.order].unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for slot in groups.starts.diff().nonzero().flatten().tolist():
            assert self._gate_up is not None and self._down is not None, "applied before it was loaded"
            pairs = slice(starts[slot], starts[slot + 1])
            tokens = groups.tokens[pairs]
            opened = self._gate(F.linear(x[tokens], self._gate_up[slot]))
            out.index_add_(0, tokens, F.linear(opened, self._down[slot]) * weights[pairs])
        return out.to(x.dtype)

    def _place(self, slot: int, part: ExpertPart) -> torch.Tensor:
        """Where the part lies. Each tensor is allocated at its first part, and its pages are taken as they are written."""
        slots, hidden, size = self._shape.slots, self._shape.hidden_size, self._shape.intermediate_size
        if part.shard == "down":
            if self._down is None:
                self._down = torch.empty(slots, hidden, size, dtype=self._dtype, device=self._device)
            return self._down[slot]
        if self._gate_up is None:
            self._gate_up = torch.empty(slots, 2 * size, hidden, dtype=self._dtype, device=self._device)
        return self._gate_up[slot].view(2, size, hidden)[int(part.shard == "up")]
