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
    """Tables on the device: `tables[g]` [max_num_seqs + 1, width] int32 mirrors the batch's table of KV group g.

    The last row is padding's: block 0 alone.
    """

    def __init__(self, batch: InputBatch, queue: DeviceQueue, device: torch.device) -> None:
        rows, width = batch.tables[0].shape
        self.tables = [torch.zeros(rows + 1, width, dtype=torch.int32, device=device) for _ in batch.tables]
        self._width = width
        self._uploads = Uploads(queue, device, UPLOAD_BYTES)

    def apply(self, plan: StepPlan, lengths: npt.NDArray[np.int64]) -> None:
        """Adds the plan's new blocks. `lengths[g, slot]` is the number of blocks of a slot in group g, the new ones included."""
        for group, table in enumerate(self.tables):
            added = [(new.slot, new.blocks[group]) for new in plan.new]
            added += [(append.slot, append.blocks) for append in plan.appends if append.group == group]
            if not added:
                continue
            flat = np.fromiter((block for _, blocks in added for block in blocks), np.int64)
            if len(flat) == 0:
                continue
            indices = self._flat_indices(added, lengths[group])
            sent = self._uploads.send(np.concatenate((indices, flat)))
            table.view(-1).index_copy_(0, sent[: len(flat)], sent[len(flat) :].int())

    def _flat_indices(self, added: list[tuple[int, list[int]]], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns each block's index in the flat table. The last piece of a slot ends at the slot's length."""
        ends = {slot: int(lengths[slot]) for slot, _ in added}
        firsts: list[int] = []
        for slot, blocks in reversed(added):
            ends[slot] -= len(blocks)
            firsts.append(slot * self._width + ends[slot])
        pieces = [np.arange(first, first + len(blocks)) for first, (_, blocks) in zip(reversed(firsts), added, strict=True)]
        return np.concatenate(pieces)
