"""Steps of few decodes, of which nobody wants more than tokens: two native calls around a replay.

Between two replays at batch 1, Python's small operations took 1.7 ms on an EPYC 7003: each finds the caches full of weights, and so
takes 10 us. That was a tenth of a step of the 0.6B shape in int4.
"""

import numpy as np
import torch

from starling_engine.ledger import RECORDED_TOKENS
from starling_engine.native.decode_inputs import DecodeInputs, GroupTables
from starling_engine.native.ops import sample_slots
from starling_engine.step import StepPlan, StepResult
from starling_engine.token_packing import pack_tokens
from starling_engine.worker.host.batch import InputBatch, Samples
from starling_engine.worker.host.recorded_steps import RecordedSteps
from starling_engine.worker.host.sampler import fill_in


class Decodes:
    """Runs those of a batch's steps that `takes` says; others are `ModelRunner`'s."""

    def __init__(self, batch: InputBatch, recorded: RecordedSteps) -> None:
        self._batch = batch
        self._recorded = recorded
        self._slots = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._starts = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._chosen = torch.zeros(RECORDED_TOKENS)
        inputs, groups = recorded.inputs, zip(batch.tables, batch.fixed_blocks, recorded.inputs.metadata, strict=True)
        shared = inputs.metadata[0]
        self._positions = shared.positions
        self._gather = DecodeInputs(
            *(self._slots, self._starts, torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths), batch.block_size),
            [GroupTables(torch.from_numpy(table), fixed, kept.slot_mapping, kept.block_tables) for table, fixed, kept in groups],
            *(inputs.ids, shared.positions, shared.query_start, shared.context_lens),
        )
        self._metadata = batch.sampling_metadata.map(lambda column: int(column.ctypes.data))
        self._seed = int(batch.seed.ctypes.data)

    def takes(self, plan: StepPlan) -> bool:
        """Returns whether each of few rows is one token, from which is sampled without a mask, adjusted logits or other outputs."""
        rows = len(plan.slots)
        return (
            rows <= RECORDED_TOKENS
            and self._recorded.possible
            and not (plan.num_drafts or plan.masked or plan.inputs)
            and all(plan.sample)
            and plan.total_tokens == rows
            and self._batch.extra_slots.isdisjoint(plan.slots)
        )

    def run(self, plan: StepPlan, result: StepResult) -> bool:
        """Runs a step. Returns False where the model cannot be recorded: nothing has been computed then."""
        rows = len(plan.slots)
        slots = self._slots[:rows]
        at, starts = slots.numpy(), self._starts.numpy()
        at[:] = plan.slots
        starts[:rows] = plan.starts
        self._gather(rows)
        found = self._recorded.replay(rows, rows)
        if found is None:
            return False
        behind = self._positions[:rows] + 1
        chosen = self._chosen[:rows]
        tokens = sample_slots(found[1], self._metadata, self._seed, slots, behind, chosen).numpy()
        ends, logits = behind.numpy(), chosen.numpy()
        self._batch.tokens[at, ends] = tokens
        self._batch.lengths[at] = ends + 1
        if np.isfinite(logits).all():
            result.counts = [1] * rows
            result.tokens = pack_tokens(tokens.tolist())
        else:
            each, none = np.arange(rows), np.zeros(rows, np.int64)
            result.counts = [0] * rows
            fill_in(result, Samples(list(range(rows)), each, none, at, each, ends), tokens, logits, none)
        return True
