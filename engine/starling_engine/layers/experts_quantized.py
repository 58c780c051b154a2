"""Experts in 2 to 8 bits on CPUs: codes of a checkpoint, or weights that are quantized while they are loaded."""

from dataclasses import replace

import torch

from starling_engine.layers.experts import ExpertPart, ExpertsShape, Projection, plain_parts
from starling_engine.layers.experts_packed import GroupedExperts
from starling_engine.native import quantized_ops as ops
from starling_engine.native.group_quantized import Format, GroupQuantized, quantize, stacked
from starling_engine.native.quantized_ops import PackedQuantized


class QuantizedExperts(GroupedExperts):
    """Packs each matrix as it is loaded. Only a gate that waits for its up, or an up that waits for its gate, is held unpacked."""

    name = "quantized"

    def __init__(self, gate_up: Format, down: Format, *, online: bool) -> None:
        """`online`: the checkpoint has numbers, and codes are made of them."""
        self._formats: dict[Projection, Format] = {"gate": gate_up, "up": gate_up, "down": down}
        self._online = online

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        assert dtype == torch.bfloat16 and device.type == "cpu"
        self._shape = shape
        self._waiting: dict[tuple[int, Projection], GroupQuantized] = {}
        self._gate_up: PackedQuantized | None = None
        self._down: PackedQuantized | None = None
        return [
            replace(part, element_bytes=self._formats[part.projection].element_bytes, codes=not self._online)
            for part in plain_parts(shape)
        ]

    def load_part(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        self.load_codes(slot, part, quantize(tensor, self._formats[part.projection]))

    def load_codes(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        if part.projection == "down":
            ops.pack_quantized_expert(matrix, self._downs(), slot)
            return
        self._waiting[slot, part.projection] = matrix
        if (slot, "gate") in self._waiting and (slot, "up") in self._waiting:
            both = stacked([self._waiting.pop((slot, "gate")), self._waiting.pop((slot, "up"))])
            ops.pack_quantized_expert(both, self._gate_ups(), slot)

    def release(self, slot: int) -> None:
        for projection in self._formats:
            self._waiting.pop((slot, projection), None)

    def memory(self, slot: int) -> list[torch.Tensor]:
        return [each[slot] for packed in (self._gate_ups(), self._downs()) for each in packed.tensors]

    @property
    def loaded(self) -> bool:
        return self._gate_up is not None and self._down is not None

    def multiply(self, x: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        activated = ops.grouped_quantized_linear(x, tokens, starts, self._gate_ups())
        return ops.grouped_quantized_sum(activated, tokens, weights, starts, self._downs(), len(x))

    def _gate_ups(self) -> PackedQuantized:
        """Allocated at its first use; its pages are taken as they are written."""
        if self._gate_up is None:
            shape = self._shape
            sizes = shape.num_slots, 2 * shape.intermediate_size, shape.hidden_size
            self._gate_up = ops.empty_quantized_experts(*sizes, self._formats["gate"], gated=True)
        return self._gate_up

    def _downs(self) -> PackedQuantized:
        if self._down is None:
            shape = self._shape
            sizes = shape.num_slots, shape.hidden_size, shape.intermediate_size
            self._down = ops.empty_quantized_experts(*sizes, self._formats["down"])
        return self._down
