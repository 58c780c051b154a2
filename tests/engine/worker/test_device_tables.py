"""Block tables on the device mirror the host's, one upload a step."""

from types import SimpleNamespace

import numpy as np
import torch
from starling_engine.params import SamplingParams
from starling_engine.platforms.interpreted import InlineQueue
from starling_engine.step import BlockAppend, NewRequest, StepPlan
from starling_engine.worker.device.device_tables import DeviceTables


class CountingQueue(InlineQueue):
    events = 0

    def record_event(self):
        self.events += 1
        return super().record_event()


def test_new_blocks_of_all_groups_come_in_one_upload() -> None:
    """A ring has as many buffers as steps may be in flight; a step that took several would have to wait for the device."""
    queue, batch = CountingQueue(), SimpleNamespace(tables=[np.zeros((3, 4), np.int32)] * 3)
    tables = DeviceTables(batch, queue, torch.device("cpu"))
    new = NewRequest(1, b"", 0, [[5, 6], [], [7]], 0, SamplingParams(), None)
    appends = [BlockAppend(0, 0, [8]), BlockAppend(1, 0, [9])]
    added = tables.added(StepPlan(0, 1, [], [], [], [], [new], appends), np.array([[1, 3, 0], [0, 0, 0], [0, 1, 0]]))
    tables.upload(added)
    assert [table[:2].tolist() for table in tables.tables] == [
        [[8, 0, 0, 0], [5, 6, 9, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[0, 0, 0, 0], [7, 0, 0, 0]],
    ]
    assert queue.events == 1
    assert not tables.added(StepPlan(1, 1, [], [], [], []), np.zeros((3, 3), np.int64))
