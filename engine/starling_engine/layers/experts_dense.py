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
    capturable = False
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

    def memory(self, slot: int) -> list[torch.Tensor]:
        return [self._gate_ups()[slot], self._downs()[slot]]

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
        """Where the part lies."""
        if part.shard == "down":
            return self._downs()[slot]
        return self._gate_ups()[slot].view(2, self._shape.intermediate_size, self._shape.hidden_size)[int(part.shard == "up")]

    def _gate_ups(self) -> torch.Tensor:
        """Allocated at its first use; its pages are taken as they are written."""
        if self._gate_up is None:
            self._gate_up = self._empty(2 * self._shape.intermediate_size, self._shape.hidden_size)
        return self._gate_up

    def _downs(self) -> torch.Tensor:
        if self._down is None:
            self._down = self._empty(self._shape.hidden_size, self._shape.intermediate_size)
        return self._down

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(self._shape.slots, rows, columns, dtype=self._dtype, device=self._device)
