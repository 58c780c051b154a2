"""The biases of experts, in one form for all methods."""

import torch

from starling_engine.layers.experts import ExpertPart, ExpertsShape


class ExpertBiases:
    """Biases of all slots. Experts without any have None in place of each tensor.

    both   gates before ups [S, 2 I], and downs [S, H], which are zeros on ranks that do not add them; None before one is loaded
    """

    both: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)

    def __init__(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._shape, self._dtype, self._device = shape.intermediate_size, shape, dtype, device

    def load(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Copies a part in, which may be empty."""
        gate_ups, downs = self._reserved()
        assert gate_ups is not None and downs is not None, "a part of experts without biases"
        if part.projection != "down":
            gate_ups[slot].view(2, self._size)[int(part.projection == "up")].copy_(tensor)
        elif len(tensor):
            downs[slot].copy_(tensor)

    def memory(self, slot: int) -> list[torch.Tensor]:
        """Does as `ExpertsMethod.memory`."""
        return [each[slot] for each in self._reserved() if each is not None]

    def _reserved(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        if self._shape.bias and self.both[0] is None:
            gate_ups, downs = (
                torch.zeros(self._shape.num_slots, width, dtype=self._dtype, device=self._device)
                for width in (2 * self._size, self._shape.hidden_size)
            )
            self.both = gate_ups, downs
        return self.both
