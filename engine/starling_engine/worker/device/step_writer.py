"""Writes a step's inputs for the device."""

import numpy as np
import torch

from starling_engine.native.sampling_metadata import GREEDY, write_rows
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.step import GIVEN, StepPlan
from starling_engine.worker.device.step_buffer import Host, StepBuffer, StepFields, StepShape
from starling_engine.worker.host.batch import FlatBatch, InputBatch

Fields = StepFields[torch.Tensor]


class StepWriter:
    """Writes steps of at most `max_tokens` tokens. One slot more than the batch has is for rows of padding."""

    def __init__(self, batch: InputBatch, queue: DeviceQueue, device: torch.device, max_tokens: int) -> None:
        self._batch = batch
        self._padding = len(batch.slot_states)
        self.longest = batch.tokens.shape[1] - 1
        """Tokens of the longest sequence: tables and rotary embeddings have no more."""
        largest = StepShape(max(max_tokens, self._padding), self._padding + 1)
        self._buffer = StepBuffer(queue, device, largest, len(batch.tables))

    def write(self, plan: StepPlan, step: FlatBatch, sampled: list[int], shape: StepShape) -> Fields:
        """Writes a step, padded to `shape`, of which the rows `sampled` are sampled from."""
        tokens, rows, count = len(step.ids), len(step.slots), len(sampled)
        f = self._buffer.host(shape)
        if (tokens, rows) != shape[:2]:
            self._fill_up(f, shape, tokens, rows, count)
        f.ids[:tokens] = step.ids
        f.positions[:tokens] = step.positions
        f.targets[:, :tokens] = step.targets
        f.query_start[0] = 0
        f.query_start[1 : rows + 1] = step.query_end
        f.context_lens[:rows] = step.ends
        f.slots[:rows] = step.slots
        fed = np.array([at != GIVEN for at in plan.sampled_in]) & (not plan.inputs)
        f.feed_slots[:rows] = np.where(fed, step.slots, self._padding)
        f.last[:rows] = step.query_end - 1
        f.feed_at[:rows] = np.where(fed, step.query_end - 1, shape.tokens)
        if count:
            slots = step.slots[sampled]
            f.sampled[:count] = sampled
            f.sampled_slots[:count] = slots
            f.ends[:count] = step.ends[sampled]
            f.seeds[:count] = self._batch.seed[slots]
            for column, values in zip(f.sampling_metadata, self._batch.sampling_metadata, strict=True):
                column[:count] = values[slots]
        return self._buffer.send(shape)

    def padding(self, shape: StepShape) -> Fields:
        """Writes a step of padding alone."""
        self._fill_up(self._buffer.host(shape), shape, 0, 0, 0)
        return self._buffer.send(shape)

    def _fill_up(self, f: StepFields[Host], shape: StepShape, tokens: int, rows: int, count: int) -> None:
        """Pads a step with rows that change nothing: one token each in a step of decodes, else the fewest prompts with room.

        They read block 0; what they compute is finite, and stored nowhere.
        """
        alone, rest = shape.decode, shape.tokens - tokens
        most = 1 if alone else self.longest
        lengths = np.clip(rest - most * np.arange(shape.rows - rows), 0, most)
        f.ids[tokens:] = 0
        f.positions[tokens:] = np.arange(rest) % most
        f.targets[:, tokens:] = -1
        f.query_start[0] = 0
        f.query_start[rows + 1 :] = tokens + lengths.cumsum()
        f.context_lens[rows:] = lengths
        f.slots[rows:] = f.feed_slots[rows:] = self._padding
        f.feed_at[rows:] = shape.tokens
        f.last[rows:] = np.arange(tokens, shape.tokens) if alone else shape.tokens - 1
        f.sampled[count:] = 0
        f.sampled_slots[count:] = self._padding
        f.ends[count:] = 1
        f.seeds[count:] = 0
        write_rows(f.sampling_metadata, slice(count, None), GREEDY)
