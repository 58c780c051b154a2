"""The orders in which columns of experts lie, where a checkpoint has them in orders of their own (GPTQ's desc_act)."""

import torch

from starling_engine.errors import WeightError
from starling_engine.layers.experts import ExpertPart, ExpertsShape, Projection
from starling_engine.native.group_quantized import Format, GroupQuantized


class ExpertOrders:
    """Orders of all slots: of the columns of x for gates and ups, and of what these give for downs."""

    def __init__(self, prefix: str, shape: ExpertsShape, gate_up: Format, down: Format, device: torch.device) -> None:
        """`prefix` names the experts in errors."""
        self._prefix = prefix
        self.gate_ups = _Orders(gate_up, shape.num_slots, shape.hidden_size, 2 * shape.intermediate_size, device)
        self.downs = _Orders(down, shape.num_slots, shape.intermediate_size, shape.hidden_size, device)
        self._first: dict[int, torch.Tensor] = {}
        """Orders of slots of which either the gate or the up has come."""

    def of(self, projection: Projection) -> "_Orders":
        return self.downs if projection == "down" else self.gate_ups

    def load(self, slot: int, part: ExpertPart, matrix: GroupQuantized) -> GroupQuantized:
        """Keeps the order of a part; returns the part with as many columns as others have, in that order."""
        orders = self.of(part.projection)
        if not orders.gathers:
            return matrix
        if matrix.codes.shape[1] > orders.width:
            raise WeightError(f"{self._prefix}: groups of the {part.projection} of an expert have unlike numbers of columns")
        laid = matrix.padded(orders.width)
        assert laid.order is not None
        if part.projection != "down":
            self._check_halves(slot, laid.order)
        orders.of(slot).copy_(laid.order)
        return laid.in_order

    def release(self, slot: int) -> None:
        """Forgets a part that waits for its other half."""
        self._first.pop(slot, None)

    def memory(self, slot: int) -> list[torch.Tensor]:
        """Does as `ExpertsMethod.memory`."""
        return [each.of(slot) for each in (self.gate_ups, self.downs) if each.gathers]

    def _check_halves(self, slot: int, order: torch.Tensor) -> None:
        first = self._first.pop(slot, None)
        if first is None:
            self._first[slot] = order
        elif not torch.equal(first, order):
            what = "gate and up of an expert have their columns in two orders"
            raise WeightError(f"{self._prefix}: {what}, which is not supported; with --dtype float32 a CPU dequantizes them")


class _Orders:
    """Orders of the columns of one matrix in all slots.

    width   columns of the matrix as it is kept
    tensor  [S, width] int32, see `GroupQuantized.order`; None where columns are in order, and before the first is loaded
    """

    tensor: torch.Tensor | None = None

    def __init__(self, form: Format, num_slots: int, columns: int, rows: int, device: torch.device) -> None:
        self.gathers, self.width = bool(form.gathered), form.laid(columns)
        self._num_slots, self._columns, self._rows, self._device = num_slots, columns, rows, device

    def of(self, slot: int) -> torch.Tensor:
        """Returns the memory of a slot's order."""
        if self.tensor is None:
            self.tensor = torch.empty(self._num_slots, self.width, dtype=torch.int32, device=self._device)
        return self.tensor[slot]

    def element_bytes(self, each: float) -> float:
        """Returns the bytes of a weight of the checkpoint, where one that is kept has `each`: groups are filled up, and ordered."""
        return (each + torch.int32.itemsize / self._rows) * self.width / self._columns if self.gathers else each
