"""Writes a step's inputs for the device."""

import numpy as np
import torch

from starling_engine.native.sampling_metadata import GREEDY, write_rows
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.step import FOLLOWS, StepPlan
from starling_engine.worker.device.step_buffer import Host, StepBuffer, StepFields, StepShape
from starling_engine.worker.host.batch import FlatBatch, InputBatch, Samples

Fields = StepFields[torch.Tensor]
NOTHING = np.zeros(0, np.int64)
NO_SAMPLES = Samples([], NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)


class StepWriter:
    """Writes steps of at most `max_tokens` tokens and `max_samples` samples.

    One slot more than the batch has is for rows of padding.
    """

    def __init__(self, batch: InputBatch, queue: DeviceQueue, device: torch.device, max_tokens: int, max_samples: int) -> None:
        self._batch = batch
        self._padding = len(batch.slot_states)
        self.longest = batch.tokens.shape[1] - 1
        """Tokens of the longest sequence: tables and rotary embeddings have no more."""
        most = max(max_tokens, max_samples)
        self._buffer = StepBuffer(
            queue, device, StepShape(most, max(max_samples, self._padding + 1), max_samples), len(batch.tables)
        )

    def write(self, plan: StepPlan, step: FlatBatch, samples: Samples, shape: StepShape) -> Fields:
        """Writes a step, padded to `shape`."""
        tokens, rows, count = len(step.ids), len(step.slots), len(samples)
        f = self._buffer.host(shape)
        if (tokens, rows, count) != shape[:3]:
            self._fill_up(f, shape, tokens, rows, samples)
        f.ids[:tokens] = step.ids
        f.token_rows[:tokens] = np.repeat(np.arange(rows), step.ends - step.starts)
        f.query_start[0] = 0
        f.query_start[1 : rows + 1] = step.query_end
        f.slots[:rows] = step.slots
        f.starts[:rows] = plan.starts
        follows = f.starts[:rows] == FOLLOWS
        f.feed_slots[:rows] = np.where(follows, step.slots, self._padding)
        f.feed_at[:rows] = np.where(follows, np.append(0, step.query_end[:-1]), shape.tokens)
        if count:
            f.sampled[:count] = samples.tokens
            f.sampled_slots[:count] = samples.slots
            f.seeds[:count] = self._batch.seed[samples.slots]
            f.first[: len(samples.rows)] = samples.first
            f.num_drafts[: len(samples.rows)] = samples.drafts
            for column, values in zip(f.sampling_metadata, self._batch.sampling_metadata, strict=True):
                column[:count] = values[samples.slots]
        return self._buffer.send(shape)

    def padding(self, shape: StepShape) -> Fields:
        """Writes a step of padding alone."""
        self._fill_up(self._buffer.host(shape), shape, 0, 0, NO_SAMPLES)
        return self._buffer.send(shape)

    def _fill_up(self, f: StepFields[Host], shape: StepShape, tokens: int, rows: int, samples: Samples) -> None:
        """Pads a step with rows that change nothing: one token each in a step of decodes, else the fewest prompts with room.

        They read block 0; what they compute is finite, and stored nowhere. The list of rows that are sampled from is filled up with
        its first one, which accepts the same drafts again.
        """
        alone, rest, count = shape.width > 0, shape.tokens - tokens, len(samples)
        most = 1 if alone else self.longest
        lengths = np.clip(rest - most * np.arange(shape.rows - rows), 0, most)
        f.ids[tokens:] = 0
        f.token_rows[tokens:] = np.repeat(np.arange(rows, shape.rows), lengths)
        f.query_start[0] = 0
        f.query_start[rows + 1 :] = tokens + lengths.cumsum()
        f.slots[rows:] = f.feed_slots[rows:] = self._padding
        f.starts[rows:] = 0
        f.feed_at[rows:] = shape.tokens
        f.sampled[count:] = np.arange(count, shape.samples) if alone else shape.tokens - 1
        f.sampled_slots[count:] = self._padding
        f.seeds[count:] = 0
        f.first[len(samples.rows) :] = samples.first[0] if samples.rows else 0
        f.num_drafts[len(samples.rows) :] = samples.drafts[0] if samples.rows else 0
        write_rows(f.sampling_metadata, slice(count, None), GREEDY)
