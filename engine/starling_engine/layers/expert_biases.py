"""The biases of experts, in one form for all methods."""

import torch

from starling_engine.layers.experts import ExpertPart, ExpertsShape


class ExpertBiases:
    """Biases of all slots: gates before ups [S, 2 I], and downs [S, H], which are zeros on ranks that do not add them."""

    def __init__(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> None:
        self._size = shape.intermediate_size
        self.gate_ups = torch.zeros(shape.num_slots, 2 * self._size, dtype=dtype, device=device)
        self.downs = torch.zeros(shape.num_slots, shape.hidden_size, dtype=dtype, device=device)

    @classmethod
    def of(cls, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> "ExpertBiases | None":
        """Makes them where experts have some."""
        return cls(shape, dtype, device) if shape.bias else None

    def load(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Copies a part in, which may be empty."""
        if part.projection != "down":
            self.gate_ups[slot].view(2, self._size)[int(part.projection == "up")].copy_(tensor)
        elif len(tensor):
            self.downs[slot].copy_(tensor)

    def memory(self, slot: int) -> list[torch.Tensor]:
        """Does as `ExpertsMethod.memory`."""
        return [self.gate_ups[slot], self.downs[slot]]
