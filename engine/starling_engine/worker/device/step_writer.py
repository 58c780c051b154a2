"""Writes a step's inputs for the device."""

import numpy as np
import torch

from starling_engine.kernels.attention_plan import QueryBlocks
from starling_engine.native.sampling_metadata import GREEDY, write_rows
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.step import FOLLOWS, StepPlan
from starling_engine.worker.device.device_tables import NO_BLOCKS, NewBlocks
from starling_engine.worker.device.step_buffer import Host, StepBuffer, StepFields, StepShape, room_for_blocks
from starling_engine.worker.host.batch import FlatBatch, InputBatch, Samples

Fields = StepFields[torch.Tensor]
NOTHING = np.zeros(0, np.int64)
NO_SAMPLES = Samples([], NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)


class StepWriter:
    """Writes steps of at most `max_tokens` tokens and `max_samples` samples.

    One slot more than the batch has is for rows of padding. `listing` as in `StepBuffer`.
    """

    def __init__(
        self,
        batch: InputBatch,
        queue: DeviceQueue,
        device: torch.device,
        max_tokens: int,
        max_samples: int,
        listing: QueryBlocks | None = None,
    ) -> None:
        self._batch = batch
        self._padding = len(batch.slot_states)
        self._padding_place = self._padding * batch.tables[0].shape[1]
        self._groups = len(batch.tables)
        self.longest = batch.tokens.shape[1] - 1
        """Tokens of the longest sequence: tables and rotary embeddings have no more."""
        most = max(max_tokens, max_samples)
        largest = StepShape(most, max(max_samples, self._padding + 1), max_samples)
        self._listing = listing
        self._buffer = StepBuffer(queue, device, largest, self._groups, listing)

    def has_room(self, shape: StepShape, new: NewBlocks) -> bool:
        """Returns whether a step of this shape can take these blocks along."""
        return len(new) <= room_for_blocks(shape, self._groups)

    def write(self, plan: StepPlan, step: FlatBatch, samples: Samples, shape: StepShape, new: NewBlocks = NO_BLOCKS) -> Fields:
        """Writes a step, padded to `shape`, with new blocks for which it has room."""
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
        self._add_blocks(f, new)
        self._list_query_blocks(f)
        return self._buffer.send(shape)

    def padding(self, shape: StepShape) -> Fields:
        """Writes a step of padding alone."""
        f = self._buffer.host(shape)
        self._fill_up(f, shape, 0, 0, NO_SAMPLES)
        self._add_blocks(f, NO_BLOCKS)
        self._list_query_blocks(f)
        return self._buffer.send(shape)

    def _add_blocks(self, f: StepFields[Host], new: NewBlocks) -> None:
        """Padding's row begins with block 0, and gets it again."""
        f.places[: len(new)], f.places[len(new) :] = new.places, self._padding_place
        f.blocks[: len(new)], f.blocks[len(new) :] = new.blocks, 0

    def _list_query_blocks(self, f: StepFields[Host]) -> None:
        """Lists those of padding, too: what attention leaves out is undefined, and padding has to be finite."""
        if self._listing is None or not len(f.query_blocks):
            return
        listed = self._listing.listed(np.diff(f.query_start))
        f.query_blocks[: len(listed)] = listed
        f.query_blocks[len(listed) :] = -1

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
