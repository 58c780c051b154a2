"""Experts on a GPU: all slots of a layer in a few launches of Triton's kernels, of plain tensors or of codes."""

from dataclasses import replace

import torch

from starling_engine.kernels import grouped
from starling_engine.kernels.coded_weight import CodedWeight, element_bytes, empty_codes, pack_codes
from starling_engine.layers.experts import ExpertPart, ExpertsShape, Projection, plain_parts
from starling_engine.layers.experts_dense import StackedExperts
from starling_engine.native.group_quantized import Format, GroupQuantized, quantize


class TritonExperts(StackedExperts):
    """Needs `triton_runs`. The device sorts tokens by expert without the host, so nothing waits, and graphs can hold a step."""

    name = "triton"
    capturable = True

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not len(x) or not self.loaded:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        tiles = grouped.tiles_for(len(x), expert_slots.shape[1], self.shape.num_experts, x.dtype)
        return grouped.experts(x, expert_slots, weights, self.gate_ups, self.downs, tiles)


class TritonQuantizedExperts:
    """Keeps codes of a checkpoint, or of weights that are quantized while they are loaded. Otherwise as `TritonExperts`."""

    name = "triton, quantized"
    capturable = True
    _gate_up: CodedWeight | None = None
    _down: CodedWeight | None = None

    def __init__(self, gate_up: Format, down: Format, *, online: bool) -> None:
        """`online`: the checkpoint has numbers, and codes are made of them."""
        self._formats: dict[Projection, Format] = {"gate": gate_up, "up": gate_up, "down": down}
        self._online = online

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:  # noqa: ARG002
        self._shape, self._device = shape, device
        return [
            replace(part, element_bytes=element_bytes(self._formats[part.projection]), codes=not self._online)
            for part in plain_parts(shape)
        ]

    def load_part(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        self.load_codes(slot, part, quantize(tensor.to(self._device), self._formats[part.projection]))

    def load_codes(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        size = self._shape.intermediate_size
        rows = slice(size, 2 * size) if part.projection == "up" else slice(0, len(matrix.codes))
        to = self._downs() if part.projection == "down" else self._gate_ups()
        for memory, tensor in zip(to.tensors, pack_codes(matrix, self._device).tensors, strict=True):
            memory[slot, rows].copy_(tensor)

    def release(self, slot: int) -> None:
        """Does nothing: the memory is kept for the next expert."""

    def memory(self, slot: int) -> list[torch.Tensor]:
        return [each[slot] for weight in (self._gate_ups(), self._downs()) for each in weight.tensors]

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not len(x) or self._gate_up is None or self._down is None:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        tiles = grouped.tiles_for(len(x), expert_slots.shape[1], self._shape.num_experts, x.dtype, coded=True)
        return grouped.experts(x, expert_slots, weights, self._gate_up, self._down, tiles)

    def _gate_ups(self) -> CodedWeight:
        """Allocated at its first use."""
        if self._gate_up is None:
            shape = self._shape
            sizes = shape.num_slots, 2 * shape.intermediate_size, shape.hidden_size
            self._gate_up = empty_codes(*sizes, self._formats["gate"], self._device)
        return self._gate_up

    def _downs(self) -> CodedWeight:
        if self._down is None:
            shape = self._shape
            sizes = shape.num_slots, shape.hidden_size, shape.intermediate_size
            self._down = empty_codes(*sizes, self._formats["down"], self._device)
        return self._down
