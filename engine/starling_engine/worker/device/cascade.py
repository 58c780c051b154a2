"""Whether a step reads once what all its sequences have in common."""

import numpy as np

from starling_engine.kernels.attention_plan import common_prefix
from starling_engine.worker.host.batch import FlatBatch, InputBatch
from starling_engine.worker.host.pages import KVPages

CASCADE_ROWS = 8
CASCADE_BYTES = 16 << 30
"""Of the cache, read by one step: about the time in which the host launches the kernels of a step one by one."""


def shared_blocks(pages: KVPages, batch: InputBatch, step: FlatBatch, *, recorded: bool) -> int:
    """Leading blocks that all rows share; where steps are recorded, only if to read them once saves more than a recorded step."""
    groups = pages.groups
    rows, size = len(step.slots), groups[0].spec.block_size
    full = [g for g, group in enumerate(groups) if not group.spec.window]
    if rows < CASCADE_ROWS or not full or len(set(batch.tables[full[0]][step.slots, 0])) > 1:
        return 0
    computed = (step.ends - np.diff(step.query_end, prepend=0)).astype(np.int32)
    width = int(computed.min()) // size
    shared = min(common_prefix(batch.tables[g][step.slots, :width], computed, size) for g in full)
    page_bytes = sum(len(groups[g].layers) * groups[g].spec.page_bytes for g in full)
    return shared if shared * (rows - 1) * page_bytes > CASCADE_BYTES or not recorded else 0
