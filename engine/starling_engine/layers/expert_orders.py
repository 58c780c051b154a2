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
        if orders.tensor is None:
            return matrix
        if matrix.codes.shape[1] > orders.width:
            raise WeightError(f"{self._prefix}: groups of the {part.projection} of an expert have unlike numbers of columns")
        laid = matrix.padded(orders.width)
        assert laid.order is not None
        if part.projection != "down":
            self._check_halves(slot, laid.order)
        orders.tensor[slot].copy_(laid.order)
        return laid.in_order

    def release(self, slot: int) -> None:
        """Forgets a part that waits for its other half."""
        self._first.pop(slot, None)

    def memory(self, slot: int) -> list[torch.Tensor]:
        """Does as `ExpertsMethod.memory`."""
        return [each.tensor[slot] for each in (self.gate_ups, self.downs) if each.tensor is not None]

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
    tensor  [S, width] int32, see `GroupQuantized.order`; None where columns are in order. Its pages are taken as they are written
    """

    def __init__(self, form: Format, num_slots: int, columns: int, rows: int, device: torch.device) -> None:
        self.width = form.laid(columns)
        self.tensor = torch.empty(num_slots, self.width, dtype=torch.int32, device=device) if form.gathered else None
        self._columns, self._rows = columns, rows

    def element_bytes(self, each: float) -> float:
        """Returns the bytes of a weight of the checkpoint, where one that is kept has `each`: groups are filled up, and ordered."""
        if self.tensor is None:
            return each
        return (each + self.tensor.itemsize / self._rows) * self.width / self._columns
