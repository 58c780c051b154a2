"""The block tables of all slots on the device; only new blocks are sent there."""

import numpy as np
import numpy.typing as npt
import torch

from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.step import StepPlan
from starling_engine.worker.device.pinned import Uploads
from starling_engine.worker.host.batch import InputBatch

UPLOAD_BYTES = 1 << 18


class DeviceTables:
    """Tables on the device: `tables` [G, max_num_seqs + 1, width] int32 mirrors the batch's tables of KV groups.

    The last row of each is padding's: block 0 alone. A row has `width` blocks.
    """

    def __init__(self, batch: InputBatch, queue: DeviceQueue, device: torch.device) -> None:
        rows, width = batch.tables[0].shape
        self.tables = torch.zeros(len(batch.tables), rows + 1, width, dtype=torch.int32, device=device)
        self.width = width
        self._uploads = Uploads(queue, device, UPLOAD_BYTES)

    def apply(self, plan: StepPlan, lengths: npt.NDArray[np.int64]) -> None:
        """Adds the plan's new blocks. `lengths[g, slot]` is the number of blocks of a slot in group g, the new ones included."""
        added = [self._added(plan, group, lengths[group]) for group in range(len(self.tables))]
        if not any(entries.size for entries in added):
            return
        # One upload for all groups: more in a step would take the buffers of steps that are in flight.
        sent = self._uploads.send(np.concatenate(added, axis=1).ravel()).view(2, -1)
        start = 0
        for table, entries in zip(self.tables, added, strict=True):
            indices, blocks = sent[:, start : start + entries.shape[1]]
            table.view(-1).index_copy_(0, indices, blocks.int())
            start += entries.shape[1]

    def _added(self, plan: StepPlan, group: int, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns [2, blocks]: indices in the group's flat table, and the blocks that belong there."""
        added = [(new.slot, new.blocks[group]) for new in plan.new]
        added += [(append.slot, append.blocks) for append in plan.appends if append.group == group]
        blocks = np.fromiter((block for _, blocks in added for block in blocks), np.int64)
        return np.stack((self._flat_indices(added, lengths), blocks)) if blocks.size else np.empty((2, 0), np.int64)

    def _flat_indices(self, added: list[tuple[int, list[int]]], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns each block's index in the flat table. The last piece of a slot ends at the slot's length."""
        ends = {slot: int(lengths[slot]) for slot, _ in added}
        firsts: list[int] = []
        for slot, blocks in reversed(added):
            ends[slot] -= len(blocks)
            firsts.append(slot * self.width + ends[slot])
        pieces = [np.arange(first, first + len(blocks)) for first, (_, blocks) in zip(reversed(firsts), added, strict=True)]
        return np.concatenate(pieces)
