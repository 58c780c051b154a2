"""The block tables of all slots on the device; only new blocks are sent there."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.step import StepPlan
from starling_engine.worker.device.pinned import Uploads
from starling_engine.worker.host.batch import InputBatch

UPLOAD_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks that a plan adds, and their places in the flat tables of all groups; both int64 [N]."""

    places: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.blocks)


NO_BLOCKS = NewBlocks(np.zeros(0, np.int64), np.zeros(0, np.int64))


class DeviceTables:
    """Tables on the device: `tables` [G, max_num_seqs + 1, width] int32 mirrors the batch's tables of KV groups.

    The last row of each is padding's: block 0 alone. A row has `width` blocks.
    """

    def __init__(self, batch: InputBatch, queue: DeviceQueue, device: torch.device) -> None:
        rows, width = batch.tables[0].shape
        self.tables = torch.zeros(len(batch.tables), rows + 1, width, dtype=torch.int32, device=device)
        self.width = width
        self._uploads = Uploads(queue, device, UPLOAD_BYTES)

    def added(self, plan: StepPlan, lengths: npt.NDArray[np.int64]) -> NewBlocks:
        """Returns the plan's new blocks. `lengths[g, slot]`: the blocks of a slot in group g, the new ones included."""
        if not plan.new and not plan.appends:
            return NO_BLOCKS
        found = [self._added(plan, group, lengths[group]) for group in range(len(self.tables))]
        return NewBlocks(*np.concatenate(found, axis=1))

    def enter(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Queues the entry of blocks, int32 [N], at their places, int64 [N], as in `NewBlocks`. May be recorded."""
        self.tables.view(-1).index_copy_(0, places, blocks)

    def upload(self, new: NewBlocks) -> None:
        """Sends any number of blocks, ahead of a step that has no room for them."""
        # One upload for all groups: more in a step would take the buffers of steps that are in flight.
        places, blocks = self._uploads.send(np.concatenate((new.places, new.blocks))).view(2, -1)
        self.enter(places, blocks.int())

    def _added(self, plan: StepPlan, group: int, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns [2, blocks]: places in the flat tables, and the group's blocks that belong there."""
        added = [(new.slot, new.blocks[group]) for new in plan.new]
        added += [(append.slot, append.blocks) for append in plan.appends if append.group == group]
        blocks = np.fromiter((block for _, blocks in added for block in blocks), np.int64)
        if not blocks.size:
            return np.empty((2, 0), np.int64)
        return np.stack((group * self.tables[0].numel() + self._flat_indices(added, lengths), blocks))

    def _flat_indices(self, added: list[tuple[int, list[int]]], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns each block's index in the group's flat table. The last piece of a slot ends at the slot's length."""
        ends = {slot: int(lengths[slot]) for slot, _ in added}
        firsts: list[int] = []
        for slot, blocks in reversed(added):
            ends[slot] -= len(blocks)
            firsts.append(slot * self.width + ends[slot])
        pieces = [np.arange(first, first + len(blocks)) for first, (_, blocks) in zip(reversed(firsts), added, strict=True)]
        return np.concatenate(pieces)
