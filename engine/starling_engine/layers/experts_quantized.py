"""Experts in 2 to 8 bits: codes of a checkpoint, or weights that are quantized while they are loaded."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch

from starling_engine.layers.expert_biases import ExpertBiases
from starling_engine.layers.expert_orders import ExpertOrders
from starling_engine.layers.experts import ExpertPart, ExpertsShape, Projection, plain_parts
from starling_engine.layers.experts_packed import GroupedExperts
from starling_engine.native import quantized_ops as ops
from starling_engine.native.group_quantized import Format, GroupQuantized, quantize, stacked
from starling_engine.native.quantized_ops import PackedQuantized


class _Matrices(Protocol):
    """Matrices of all slots, as kernels have them."""

    @property
    def tensors(self) -> list[torch.Tensor]: ...


M = TypeVar("M", bound=_Matrices)


class CodedExperts(ABC, Generic[M]):
    """Base of methods for codes. They say how memory is reserved and filled."""

    _gate_up: M | None = None
    _down: M | None = None

    def __init__(self, gate_up: Format, down: Format, *, online: bool, prefix: str = "experts") -> None:
        """`online`: the checkpoint has numbers, and codes are made of them. `prefix` names the experts in errors."""
        self._formats: dict[Projection, Format] = {"gate": gate_up, "up": gate_up, "down": down}
        self._online = online
        self._prefix = prefix

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        self._shape, self._device = shape, device
        self._biases = ExpertBiases(shape, dtype, device)
        self._orders = ExpertOrders(self._prefix, shape, self._formats["gate"], self._formats["down"], device)
        return [
            part if part.name == "bias" else replace(part, element_bytes=self._bytes_of(part.projection), codes=not self._online)
            for part in plain_parts(shape)
        ]

    def _bytes_of(self, projection: Projection) -> float:
        return self._orders.of(projection).element_bytes(self.element_bytes(self._formats[projection]))

    def load_part(self, slot: int, part: ExpertPart, tensor: torch.Tensor) -> None:
        if part.name == "bias":
            self._biases.load(slot, part, tensor)
            return
        self.load_codes(slot, part, quantize(tensor.to(self._device), self._formats[part.projection]))

    def load_codes(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        self.place(slot, part, self._orders.load(slot, part, matrix.plain))

    def release(self, slot: int) -> None:
        self._orders.release(slot)

    @abstractmethod
    def place(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        """Copies the part in, whose columns are in the order that the slot's are kept in."""

    @abstractmethod
    def element_bytes(self, form: Format) -> float:
        """Returns the bytes of a weight."""

    @abstractmethod
    def empty(self, n: int, k: int, form: Format, *, gated: bool) -> M:
        """Reserves memory for matrices [n, k] of all slots; its pages are taken as they are written."""

    def memory(self, slot: int) -> list[torch.Tensor]:
        weights = [each[slot] for matrices in (self.gate_ups(), self.downs()) for each in matrices.tensors]
        return weights + self._orders.memory(slot) + self._biases.memory(slot)

    @property
    def loaded(self) -> bool:
        """True once a weight of each kind has been loaded."""
        return self._gate_up is not None and self._down is not None

    def gate_ups(self) -> M:
        """Returns gates above ups of all slots; reserved at its first use."""
        if self._gate_up is None:
            width, form = self._orders.gate_ups.width, self._formats["gate"].in_order
            self._gate_up = self.empty(2 * self._shape.intermediate_size, width, form, gated=True)
        return self._gate_up

    def downs(self) -> M:
        if self._down is None:
            width, form = self._orders.downs.width, self._formats["down"].in_order
            self._down = self.empty(self._shape.hidden_size, width, form, gated=False)
        return self._down


class QuantizedExperts(CodedExperts[PackedQuantized], GroupedExperts):
    """Packs each matrix as it is loaded. Only a gate that waits for its up, or an up that waits for its gate, is held unpacked."""

    name = "quantized"

    def create(self, shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> list[ExpertPart]:
        assert dtype == torch.bfloat16 and device.type == "cpu"
        self._waiting: dict[tuple[int, Projection], GroupQuantized] = {}
        return super().create(shape, dtype, device)

    def place(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> None:
        if part.projection == "down":
            ops.pack_quantized_expert(matrix, self.downs(), slot)
            return
        self._waiting[slot, part.projection] = matrix
        if (slot, "gate") in self._waiting and (slot, "up") in self._waiting:
            both = stacked([self._waiting.pop((slot, "gate")), self._waiting.pop((slot, "up"))])
            ops.pack_quantized_expert(both, self.gate_ups(), slot)

    def element_bytes(self, form: Format) -> float:
        return form.element_bytes

    def empty(self, n: int, k: int, form: Format, *, gated: bool) -> PackedQuantized:
        return ops.empty_quantized_experts(self._shape.num_slots, n, k, form, gated=gated)

    def release(self, slot: int) -> None:
        super().release(slot)
        for projection in self._formats:
            self._waiting.pop((slot, projection), None)

    def multiply(self, x: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        (gate_ups, downs), rows, count = self._biases.both, tokens, len(x)
        before_gates, before_downs = self._orders.gate_ups.tensor, self._orders.downs.tensor
        if before_gates is not None:
            x, rows = ops.gather_columns_of_pairs(x, tokens, starts, before_gates, len(tokens))
        activated = ops.grouped_quantized_linear(x, rows, starts, self.gate_ups(), gate_ups, self._shape.gate)
        if before_downs is not None:
            activated, _ = ops.gather_columns_of_pairs(activated, None, starts, before_downs, len(tokens))
        return ops.grouped_quantized_sum(activated, tokens, weights, starts, self.downs(), count, downs)
