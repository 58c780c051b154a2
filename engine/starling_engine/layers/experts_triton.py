"""Experts on a GPU: all slots of a layer in a few launches of Triton's kernels, of plain tensors, of codes, or of FP8."""

import torch

from starling_engine.kernels import grouped
from starling_engine.kernels.coded_weight import CodedWeight, element_bytes, empty_codes, pack_codes
from starling_engine.kernels.fp8 import kept_rows, scaled_bytes
from starling_engine.kernels.scaled_weight import ScaledWeight, empty_scaled
from starling_engine.layers.experts import ExpertPart
from starling_engine.layers.experts_dense import StackedExperts
from starling_engine.layers.experts_quantized import CodedExperts
from starling_engine.model_config.quantization import ROUNDED_GROUP
from starling_engine.native.group_quantized import Format, GroupQuantized


class TritonExperts(StackedExperts):
    """Needs `triton_runs`. The device sorts tokens by expert without the host, so nothing waits, and graphs can hold a step."""

    name = "triton"
    capturable = True

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not len(x) or not self.loaded:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        tiles = grouped.tiles_for(len(x), expert_slots.shape[1], self.shape.num_experts, x.dtype)
        return grouped.experts(x, expert_slots, weights, self.gate_ups, self.downs, tiles, self.biases.both, self.shape.gate)


class TritonQuantizedExperts(CodedExperts[CodedWeight]):
    """Does as `TritonExperts` with codes of a checkpoint, or of weights that are quantized while they are loaded."""

    name = "triton, quantized"
    capturable = True

    def place(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        size = self._shape.intermediate_size
        rows = slice(size, 2 * size) if part.projection == "up" else slice(0, len(matrix.codes))
        to = self.downs() if part.projection == "down" else self.gate_ups()
        for memory, tensor in zip(to.tensors, pack_codes(matrix, self._device).tensors, strict=True):
            memory[slot, rows].copy_(tensor)

    def element_bytes(self, form: Format) -> float:
        return element_bytes(form)

    def empty(self, n: int, k: int, form: Format, *, gated: bool) -> CodedWeight:  # noqa: ARG002
        return empty_codes(self._shape.num_slots, n, k, form, self._device)

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not len(x) or not self.loaded:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        tiles = grouped.tiles_for(len(x), expert_slots.shape[1], self._shape.num_experts, x.dtype, coded=True)
        orders = self._orders.gate_ups.tensor, self._orders.downs.tensor
        return grouped.experts(
            x, expert_slots, weights, self.gate_ups(), self.downs(), tiles, self._biases.both, self._shape.gate, orders
        )


class TritonScaledExperts(CodedExperts[ScaledWeight]):
    """Does as `TritonQuantizedExperts` with FP8 that is multiplied by rows of FP8 (`kernels.fp8.rounds`)."""

    name = "triton, FP8"
    capturable = True

    def place(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        size, form = self._shape.intermediate_size, matrix.format
        start = size if part.projection == "up" else 0
        to = self.downs() if part.projection == "down" else self.gate_ups()
        to.codes[slot, start : start + len(matrix.codes)].copy_(matrix.codes.view(torch.float8_e4m3fn))
        step = max(1, to.block_rows)
        scales = matrix.scales[:, 0] if form.by_row else matrix.scales[::step, :: ROUNDED_GROUP // form.group]
        to.scales[slot, start // step : start // step + len(scales)].copy_(scales)

    def element_bytes(self, form: Format) -> float:
        return scaled_bytes(form)

    def empty(self, n: int, k: int, form: Format, *, gated: bool) -> ScaledWeight:
        whole = all(each % ROUNDED_GROUP == 0 for each in (self._shape.intermediate.start, n // 2 if gated else n))
        return empty_scaled(self._shape.num_slots, n, k, form, kept_rows(form) if whole else 1, self._device)

    def apply(self, x: torch.Tensor, expert_slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not len(x) or not self.loaded:
            return torch.zeros_like(x, memory_format=torch.contiguous_format)
        tiles = grouped.scaled_tiles_for(len(x), expert_slots.shape[1], self._shape.num_experts)
        return grouped.experts(x, expert_slots, weights, self.gate_ups(), self.downs(), tiles, self._biases.both, self._shape.gate)
