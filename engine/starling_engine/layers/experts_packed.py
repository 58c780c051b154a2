"""Experts for bf16 on CPUs: packed weights, and all slots of a layer in one call of the native kernel."""

from abc import ABC, abstractmethod

import torch

from starling_engine.layers.expert_biases import ExpertBiases
from starling_engine.layers.experts import ExpertPart, ExpertsShape, plain_parts
from starling_engine.native import elementwise_ops, ops, routing_ops
from starling_engine.native.reference import PackedExperts


class GroupedExperts(ABC):
    """Base of methods that multiply all slots of a layer in one call for gates and ups, and one for downs."""

    capturable = False
    _shape: ExpertsShape

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not self.loaded:
            return torch.zeros(x.shape, dtype=x.dtype)
        starts, tokens, by_pair = routing_ops.group_by_slot(expert_slots.contiguous(), weights.contiguous(), self._shape.num_slots)
        return self.multiply(x, starts, tokens, by_pair)

    @property
    @abstractmethod
    def loaded(self) -> bool:
        """True once a weight has been loaded."""

    @abstractmethod
    def multiply(self, x: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Does as `ExpertsMethod.apply` for pairs that are sorted, see `routing_ops.group_by_slot`."""


class NativeExperts(GroupedExperts):
    """Packs each matrix as it is loaded. Only a gate that waits for its up is held unpacked; experts may have ups alone."""

    name = "native"
    _gate_up: PackedExperts | None = None
    _down: PackedExperts | None = None

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        assert dtype == torch.bfloat16 and device.type == "cpu"
        self._shape = shape
        self._staged: dict[int, torch.Tensor] = {}
        self._biases = ExpertBiases(shape, dtype, device)
        return plain_parts(shape)

    def load_part(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        if part.name == "bias":
            self._biases.load(slot, part, tensor)
        elif part.projection == "down":
            self._load_down(slot, tensor)
        elif not self._shape.gated:
            ops.pack_expert(tensor.to(torch.bfloat16).contiguous(), self._gate_ups(), slot)
        else:
            self._load_half(slot, part, tensor)

    def release(self, slot: int) -> None:
        self._staged.pop(slot, None)

    def memory(self, slot: int) -> list[torch.Tensor]:
        return [self._gate_ups().data[slot], self._downs().data[slot], *self._biases.memory(slot)]

    @property
    def loaded(self) -> bool:
        return self._gate_up is not None and self._down is not None

    def multiply(self, x: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_ups, downs = self._biases.both
        activated = ops.grouped_linear(x, tokens, starts, self._gate_ups(), gate_ups, self._shape.gate)
        if not self._shape.gated:
            elementwise_ops.activate("relu2", activated)
        return ops.grouped_sum(activated, tokens, weights, starts, self._downs(), len(x), downs)

    def _load_down(self, slot: int, tensor: torch.Tensor) -> None:
        ops.pack_expert(tensor.to(torch.bfloat16).contiguous(), self._downs(), slot)

    def _load_half(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        """Packs gate and up together: the first of the two waits."""
        size, hidden = self._shape.intermediate_size, self._shape.hidden_size
        both = slot in self._staged
        whole = self._staged.pop(slot) if both else torch.empty(2, size, hidden, dtype=torch.bfloat16)
        whole[int(part.projection == "up")].copy_(tensor)
        if not both:
            self._staged[slot] = whole
            return
        ops.pack_expert(whole.view(2 * size, hidden), self._gate_ups(), slot)

    def _gate_ups(self) -> PackedExperts:
        """Allocated at its first use; its pages are taken as they are written."""
        if self._gate_up is None:
            shape = self._shape
            rows = shape.up_parts * shape.intermediate_size
            self._gate_up = ops.empty_experts(shape.num_slots, rows, shape.hidden_size, gated=shape.gated)
        return self._gate_up

    def _downs(self) -> PackedExperts:
        if self._down is None:
            self._down = ops.empty_experts(self._shape.num_slots, self._shape.hidden_size, self._shape.intermediate_size)
        return self._down
