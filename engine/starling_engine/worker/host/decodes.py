"""Steps of few decodes, of which nobody wants more than tokens: one native call makes inputs, runs the model, and samples.

Where torch adds to embeddings (positions), inputs and embeddings come before that call.

Between two replays at batch 1, Python's small operations took 1.7 ms on an EPYC 7003: each finds the caches full of weights, and so
takes 10 us. That was a tenth of a step of the 0.6B shape in int4.
"""

from math import isfinite

import numpy as np
import torch

from starling_engine.ledger import RECORDED_TOKENS
from starling_engine.native.decode_batch import DecodeBatch, GroupTables
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
        wide = [torch.zeros(RECORDED_TOKENS, dtype=torch.int64) for _ in range(3)]
        self._slots, starts, self._behind = wide
        self._chosen = torch.zeros(RECORDED_TOKENS)
        self._slot_rows, self._start_rows, self._end_rows = (each.numpy() for each in wide)
        self._chosen_rows = self._chosen.numpy()
        inputs, groups = recorded.inputs, zip(batch.tables, batch.fixed_blocks, recorded.inputs.metadata, strict=True)
        shared = inputs.metadata[0]
        self._kernels = DecodeBatch(
            *(self._slots, starts, torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths), batch.block_size),
            [GroupTables(torch.from_numpy(table), fixed, kept.slot_mapping, kept.block_tables) for table, fixed, kept in groups],
            *(inputs.ids, shared.positions, self._behind, shared.query_start, shared.context_lens),
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

    def before(self, rows: int) -> None:
        """See `Around`."""
        self._kernels.gather(rows)

    def after(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Around`."""
        rows = len(logits)
        sampled = sample_slots(logits, self._metadata, self._seed, self._slots[:rows], self._behind[:rows], self._chosen[:rows])
        self._kernels.take(sampled)
        return sampled

    def run(self, plan: StepPlan, result: StepResult) -> bool:
        """Runs a step. Returns False where the model cannot be recorded: nothing has been computed then."""
        rows = len(plan.slots)
        self._slot_rows[:rows] = plan.slots
        self._start_rows[:rows] = plan.starts
        step = self._recorded.replay(rows, rows, self)
        if step is None:
            return False
        assert step.sampled is not None, "it was recorded with what samples"
        logits = self._chosen_rows[:rows]
        if all(map(isfinite, logits.tolist())):
            result.counts = [1] * rows
            result.tokens = pack_tokens(step.sampled.tolist())
        else:
            each, none = np.arange(rows), np.zeros(rows, np.int64)
            result.counts = [0] * rows
            samples = Samples(list(range(rows)), each, none, self._slot_rows[:rows], each, self._end_rows[:rows])
            fill_in(result, samples, step.sampled, logits, none)
        return True
