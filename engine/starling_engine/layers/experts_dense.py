"""Experts as plain tensors and torch's own matrix products. Works for every dtype on every device."""

from functools import cached_property, partial

import torch

from starling_engine.kernels.matmul import linear
from starling_engine.layers.activation import activate, silu_and_mul
from starling_engine.layers.expert_biases import ExpertBiases
from starling_engine.layers.experts import ExpertPart, ExpertsShape, group_by_slot, plain_parts
from starling_engine.native.reference import expert_gate


class StackedExperts:
    """Storage of an `ExpertsMethod`: all slots' gates and ups in one tensor [S, 2 I, H], their downs in another one [S, H, I].

    Biases lie likewise, where experts have some. Experts that are not gated have ups alone, and no biases.
    """

    shape: ExpertsShape
    loaded = False
    """True once a weight has been loaded."""

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        self.shape, self._dtype, self._device = shape, dtype, device
        self.biases = ExpertBiases(shape, dtype, device)
        return plain_parts(shape)

    def load_part(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        if part.name == "bias":
            self.biases.load(slot, part, tensor)
            return
        self._memory_of(slot, part).copy_(tensor)
        self.loaded = True

    def release(self, slot: int) -> None:
        """Does nothing: the memory is kept for the next expert."""

    def memory(self, slot: int) -> list[torch.Tensor]:
        self.loaded = True  # the caller may write to it
        return [self.gate_ups[slot], self.downs[slot], *self.biases.memory(slot)]

    @cached_property
    def gate_ups(self) -> torch.Tensor:
        """Allocated at its first use; its pages are taken as they are written."""
        return self._empty(self.shape.up_parts * self.shape.intermediate_size, self.shape.hidden_size)

    @cached_property
    def downs(self) -> torch.Tensor:
        return self._empty(self.shape.hidden_size, self.shape.intermediate_size)

    def _memory_of(self, slot: int, part: ExpertPart) -> torch.Tensor:
        """Returns the memory of the part."""
        if part.projection == "down":
            return self.downs[slot]
        parts = self.gate_ups[slot].view(self.shape.up_parts, self.shape.intermediate_size, self.shape.hidden_size)
        return parts[-1 if part.projection == "up" else 0]

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty(self.shape.num_slots, rows, columns, dtype=self._dtype, device=self._device)


class DenseExperts(StackedExperts):
    """Multiplies one expert after another, and only those that this step's tokens go to."""

    name = "dense"
    capturable = False

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        gate = shape.gate
        self._activation = silu_and_mul(dtype, device) if gate is None else partial(expert_gate, gate=gate)
        if not shape.gated:
            self._activation = partial(activate, "relu2")
        return super().create(shape, dtype, device)

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        groups = group_by_slot(expert_slots, self.shape.num_slots)
        starts, weights = groups.starts.tolist(), weights.flatten()[groups.order].unsqueeze(-1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for slot in groups.starts.diff().nonzero().flatten().tolist():
            assert self.loaded, "applied before it was loaded"
            pairs = slice(starts[slot], starts[slot + 1])
            tokens = groups.tokens[pairs]
            gate_up, down = self.biases.memory(slot) or (None, None)
            activated = self._activation(linear(x[tokens], self.gate_ups[slot], gate_up))
            out.index_add_(0, tokens, linear(activated, self.downs[slot], down) * weights[pairs])
        return out.to(x.dtype)
