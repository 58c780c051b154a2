"""Runs plans on a device that works on its own: a step is queued while the one before still runs.

The tokens that a step samples stay on the device, where the next step finds them. The host gets them with the result, by one copy.
"""

import gc
import itertools
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from starling_engine.config import SpeculativeConfig
from starling_engine.ipc.collection import no_collection
from starling_engine.kernels.ahead import LateKernels
from starling_engine.kernels.attention_metadata import AttentionMetadata, HostLens
from starling_engine.kernels.attention_plan import (
    MAX_DECODE_ROWS,
    MAX_DECODE_TOKENS,
    PROGRAMS_PER_SM,
    QueryBlocks,
    common_prefix,
    keys_saved,
)
from starling_engine.kv.spec import LatentSpec
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.platforms.triton_support import sms
from starling_engine.sampling.select import SampleOp
from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.device.device_drafter import DeviceDrafter, NgramDrafter
from starling_engine.worker.device.device_positions import DevicePositions
from starling_engine.worker.device.device_sampler import DeviceSampler
from starling_engine.worker.device.device_tables import NO_BLOCKS, DeviceTables
from starling_engine.worker.device.extra_outputs import ExtraOutputs
from starling_engine.worker.device.graphs import Graphs
from starling_engine.worker.device.in_flight import InFlight
from starling_engine.worker.device.pinned import Uploads
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.device.step_writer import NO_SAMPLES, Fields, StepWriter
from starling_engine.worker.drafted_states import DraftedStates
from starling_engine.worker.host.batch import FlatBatch, InputBatch, Samples
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.masks import StepMasking
from starling_engine.worker.pending_step import PendingStep
from starling_engine.worker.prompt_outputs import NoModel, RunnableModel
from starling_engine.worker.stage import StageLink

CASCADE_ROWS = 8
CASCADE_BYTES = 16 << 30
"""Bytes of the cache that one step reads in about the time in which the host launches its kernels one by one."""

USUAL_TOKENS = 32
"""A step of so many tokens has as many launches as any. Those of fewer rows have fewer: kernels for few rows do more in each."""

LONG_CONTEXT = 32 << 10
"""Keys that one program reads, in each layer, in about the time in which the host launches the layer's kernels."""


class DeviceRunner:
    """See `Runner`. With `recorded`, steps of usual sizes run as graphs; `tick` is called as each has been recorded.

    Those of prompts have up to `launched_tokens` tokens.

    `cascades`: attention can use `AttentionMetadata.shared_blocks`. `query_blocks` lists those of prompts for it; None: it takes no
    list. With `own_drafts`, plans may have OWN drafts, by prompt lookup. `sums`: several ranks sum, by kernels for their sizes.
    """

    def __init__(
        self,
        model: RunnableModel,
        pages: KVPages,
        batch: InputBatch,
        op: SampleOp,
        tick: Callable[[], None],
        link: StageLink,
        queue: DeviceQueue,
        masking: StepMasking,
        *,
        max_tokens: int,
        max_samples: int,
        max_drafts: int,
        vocab_size: int,
        recorded: bool,
        launched_tokens: int,
        cascades: bool,
        query_blocks: QueryBlocks | None,
        own_drafts: SpeculativeConfig | None,
        sums: bool,
    ) -> None:
        self._pages = pages
        self._batch = batch
        self._tick = tick
        self._link = link
        self._queue = queue
        device, rows = pages.device, len(batch.slot_states)
        self._max_tokens = max_tokens
        self._max_rows = rows
        self._max_samples = max_samples
        self._cascades = cascades
        self._sums = sums
        self._late: LateKernels | None = None
        self._by_library = False
        """True where a library has computed the attention of the step's prompts."""
        self._tables = DeviceTables(batch, queue, device)
        self._writer = StepWriter(batch, queue, device, max_tokens, max_samples, query_blocks)
        self._positions = DevicePositions(rows, batch.block_size, device)
        self._drafted = DraftedStates(Uploads(queue, device, 4 * 8 * (max_samples + 1)).send)
        self._drafter = DeviceDrafter()
        if own_drafts is not None:
            self._drafter = NgramDrafter(own_drafts, batch, self._positions, queue, device)
        self._sampler = DeviceSampler(op, max_samples, vocab_size, self._positions)
        self._extra_outputs = ExtraOutputs(batch, self._sampler, queue, device, masking)
        self._use(model)
        self._in_flight = InFlight(batch, queue, self._sampler.out)
        longest = min(max_tokens, self._writer.longest)
        longest = min(longest, launched_tokens)
        self._graphs = Graphs(queue, rows, longest, max_samples, max_drafts) if recorded else None
        top = self._graphs.shapes[0].tokens if self._graphs is not None else 0
        self._arrived = None if link.first else link.blank(top)
        """[tokens of the largest recorded step, hidden_size]: input of recorded steps, from the stage before."""
        self._hidden = link.blank(max_samples if link.last else top)
        """[max_samples, hidden_size]: output of recorded steps: states that are sampled from, or all tokens' for the next stage."""

    # ---- a step ----

    def launch(self, plan: StepPlan) -> PendingStep:
        began = time.perf_counter()
        self._in_flight.absorb()
        self._batch.apply(plan)
        step = self._batch.gather(plan)
        if self._is_alone:
            self._drafted.forget()  # rows of a step that failed: their slots and blocks may be others' by now
        else:
            self._drafted.leave([*plan.freed_slots, *(new.slot for new in plan.new)])
            self._drafted.settle_before(step)
        self._pages.copy(plan)
        result = StepResult(plan.step_id, plan.epoch, compiled=self._late.take() if self._late is not None else 0)
        result.eager = self._graphs.not_recorded if self._graphs is not None else 0
        self._by_library = False
        if not self._link.last:
            self._run_stage(plan, step)
            return self._in_flight.add(result, NO_SAMPLES, began)
        result.counts = [0] * len(plan.slots)
        samples = step.samples(self._batch.sampling_rows(plan))
        fields, hidden = self._run(plan, step, samples)
        result.by_library = self._by_library
        readback = self._extra_outputs.serve(plan, step, samples, fields, hidden, result)
        if self._is_alone:
            self._drafted.settle(self._positions.lengths)
        self._drafter.append(fields, self._sampler.out[: len(samples), 0])
        launched = self._in_flight.add(result, samples, began)
        launched.readback = readback
        return launched

    def on_ready(self) -> None:
        """Every kernel has been met; later ones are counted."""
        self._late = LateKernels()

    @property
    def makes_drafts(self) -> bool:
        return self._drafter.active

    @property
    def _is_alone(self) -> bool:
        """True where the device knows what is accepted; of several stages the last one does, and plans say where rows are."""
        return self._link.first and self._link.last

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)
        self._drafted.leave([slot])

    def record(self) -> None:
        """Records steps of all sizes, made of padding alone."""
        if self._graphs is not None:
            gc.collect()
            with no_collection():
                for shape in self._graphs.shapes:
                    self._graphs.run(shape, self._work(self._writer.padding(shape), shape))
                    self._tick()

    def warm(self) -> None:
        """Runs what is neither recorded nor the largest step, once, so that every kernel has been met: of padding alone.

        What chooses between two kernels grows with the tokens of a row, with rows or with the common prefix. So the least and the
        most of each are enough, and powers of two where there are more than two kernels.
        """
        rows, longest = min(self._max_rows, self._max_tokens, self._max_samples), min(self._max_tokens, self._writer.longest)
        # Rows of few tokens, up to those that are prompts in any tiles; and the fewer rows, the more segments have their contexts.
        widths = [min(width, longest) for width in _powers(2 * MAX_DECODE_ROWS)]
        for width, count in sorted({*itertools.product(widths, (1, rows)), *itertools.product((1, widths[-1]), _powers(rows))}):
            self._meet(width, count)
        self._meet(widths[-1], 1, host_lens=((0, widths[-1]), (widths[-1],)))
        most_shared = self._tables.width - 2  # a row's last token is in no common block
        if self._cascades and rows >= CASCADE_ROWS and most_shared > 0:
            prefixes = {*_powers(most_shared), most_shared}
            alone = itertools.product((1,), {CASCADE_ROWS, rows}, prefixes)
            wider = itertools.product({*widths, longest}, (rows,), (most_shared,))
            for width, count, shared in sorted({*alone, *wider}):
                self._meet(width, count, shared=shared)
        if self._sums:
            for tokens in _powers(self._max_tokens):
                self._run_largest(tokens, 1)
                self._tick()
        self._drafter.warm(self._writer.padding(StepShape(1, 1, 1)))
        if self._pages.has_state:
            self._meet_drafts()

    def _meet(self, width: int, rows: int, host_lens: HostLens | None = None, shared: int = 0) -> None:
        """Runs a step of rows of at most `width` tokens. They have so many together, or one each: none is left undefined.

        One row samples, too: its head's product has a kernel of its own. The largest step samples as many as can be.
        """
        tokens = rows if width == 1 else width  # all in the first row
        fields = self._writer.padding(StepShape(tokens, rows, 1, width=int(width == 1)))
        hidden = self._forward(fields, None, width, host_lens, self._blank(tokens), shared)
        if (width, rows) == (1, 1) and self._link.last:
            self._head(fields, hidden, 0)
        self._tick()

    def _meet_drafts(self) -> None:
        """Runs a row with a draft, and lets its state move on: what is kept of the row lies in memory in another way."""
        slot, zero, two = np.array([self._max_rows]), np.array([0]), np.array([2])
        step = FlatBatch(slot, zero, np.array([1]), np.zeros(2, np.int32), np.arange(2), two, two, 2)
        self._forward(self._writer.padding(StepShape(2, 1, 1)), None, 2, None, self._blank(2), step=step)
        self._drafted.settle(self._positions.lengths)
        self._tick()

    def on_sleep(self) -> None:
        self._use(NoModel())
        self._drafted.forget()
        self._sampler.forget()
        self._drafter.forget()
        self._extra_outputs.forget()
        if self._graphs is not None:
            self._graphs.forget()

    def on_wake(self, model: RunnableModel) -> None:
        """Takes the model. Steps are recorded again as they come, so that waking does not wait for it."""
        self._use(model)

    def _use(self, model: RunnableModel) -> None:
        self._model = model
        self._extra_outputs.use(model)

    def peak_bytes(self) -> int | None:
        """Returns the memory that steps take beyond weights and cache; None if it cannot be measured."""
        run = partial(self._run_largest, self._max_tokens, self._max_samples, self._extra_outputs.run_largest)
        largest = self._queue.peak_bytes(run)
        if largest is None or self._graphs is None:
            return largest
        # Recorded steps have memory of their own, which all of them share.
        top = self._graphs.shapes[0].tokens
        return largest + (self._queue.peak_bytes(partial(self._run_largest, top, min(top, self._max_samples))) or 0)

    def recording_bytes(self) -> int:
        """Returns the memory that recordings take beyond their tensors: executables, and workspaces of libraries."""
        if self._graphs is None:
            return 0
        shapes = self._graphs.shapes
        shape = next((each for each in reversed(shapes) if each.tokens >= USUAL_TOKENS), shapes[0])
        work = self._work(self._writer.padding(shape), shape)
        work()
        gc.collect()
        with no_collection():
            return self._queue.recording_bytes(work, len(self._graphs.shapes))

    def _run_largest(self, tokens: int, samples: int, then: Callable[[Fields, torch.Tensor], None] = lambda *_: None) -> None:
        """Runs a step of padding alone and samples from it; `then` gets the samples and their hidden states."""
        longest = self._writer.longest
        tokens = min(tokens, self._max_rows * longest)
        fields = self._writer.padding(StepShape(tokens, -(-tokens // longest), 1))
        hidden = self._forward(fields, None, min(tokens, longest), arrived=self._blank(tokens))
        if self._link.last:
            fields = self._writer.padding(StepShape(samples, samples, samples, width=1))
            hidden = hidden[:1].expand(samples, -1).contiguous()
            self._positions.locate(fields, self._tables.tables)
            self._head(fields, hidden, 0)
            then(fields, hidden)
            self._drafter.append(fields, self._sampler.out[:samples, 0])

    # ---- its parts ----

    def _blank(self, tokens: int) -> torch.Tensor | None:
        """Returns states as if they came from the stage before."""
        return None if self._link.first else self._link.blank(tokens)

    def _run(self, plan: StepPlan, step: FlatBatch, samples: Samples) -> tuple[Fields, torch.Tensor | None]:
        """Runs a step; returns its samples, and the hidden states of all tokens if rows read their prompts."""
        tokens, count = len(step.ids), len(samples)
        decode = count == tokens
        every = self._batch.any_needs_all_hidden_states(plan)
        shared = _shared_blocks(self._pages, self._batch, step, recorded=self._graphs is not None) if self._cascades else 0
        shape = None if shared or every else self._recorded(step, decode=decode)
        fields = self._write(plan, step, samples, shape or StepShape(tokens, len(step.slots), count))
        self._drafter.propose(plan, fields)
        sampled, most_drafts = fields.samples(len(samples.rows), count), int(step.drafts.max())
        if shape is not None:
            self._replay(shape, fields, tokens)
            if count and not shape.width:
                self._head(sampled, self._hidden[:count], most_drafts)
            return sampled, None
        arrived = self._link.receive(tokens)
        hidden = self._forward(
            fields, None if decode or every else sampled.sampled, step.longest, step.host_lens, arrived, shared, step
        )
        if count:
            self._head(sampled, hidden.index_select(0, sampled.sampled) if every else hidden, most_drafts)
        return sampled, hidden if every else None

    def _run_stage(self, plan: StepPlan, step: FlatBatch) -> None:
        """Runs a step in a stage before the last: all tokens' states go to the next one."""
        tokens = len(step.ids)
        shape = self._recorded(step, decode=True)
        fields = self._write(plan, step, NO_SAMPLES, shape or StepShape(tokens, len(step.slots), 0))
        if shape is not None:
            self._replay(shape, fields, tokens)
            # The next replay does not wait until these have been sent.
            self._link.send(self._hidden[:tokens].clone())
            return
        self._link.send(self._forward(fields, None, step.longest, step.host_lens, self._link.receive(tokens), step=step))

    def _write(self, plan: StepPlan, step: FlatBatch, samples: Samples, shape: StepShape) -> Fields:
        """Writes the step. The blocks that it adds are in it, and so in its recording; those of long prompts go ahead of it."""
        new = self._tables.added(plan, self._batch.table_lengths)
        if not self._writer.has_room(shape, new):
            self._tables.upload(new)
            new = NO_BLOCKS
        return self._writer.write(plan, step, samples, shape, new)

    def _recorded(self, step: FlatBatch, *, decode: bool) -> StepShape | None:
        """Returns the smallest recorded size with room for the step; None where it takes less time as it comes.

        `decode`: all its tokens are sampled behind, or none is.
        """
        if self._graphs is None:
            return None
        tokens = len(step.ids)
        shape = self._graphs.decode(tokens, step.longest) if decode else None
        if shape is not None:
            return shape
        shape = self._graphs.mixed(tokens, len(step.slots))
        room = self._tables.width * self._batch.block_size
        if shape is not None and _splitting_pays(self._pages, step, room, shape.rows, sms(self._pages.device)):
            return None
        return shape

    def _replay(self, shape: StepShape, fields: Fields, tokens: int) -> None:
        assert self._graphs is not None, "without graphs no size is recorded"
        if self._arrived is not None:
            self._link.receive(tokens, self._arrived)
            self._arrived[tokens : shape.tokens].zero_()  # padding stays finite
        self._graphs.run(shape, self._work(fields, shape))

    def _work(self, fields: Fields, shape: StepShape) -> Callable[[], None]:
        """Returns the work to record: a whole step of decodes, or one with prompts up to the states that are sampled from."""
        arrived = self._arrived[: shape.tokens] if self._arrived is not None else None
        if shape.width and self._link.last:
            return lambda: self._head(fields, self._forward(fields, None, shape.width, arrived=arrived), shape.width - 1)
        return partial(self._keep_hidden, fields, shape, arrived)

    def _keep_hidden(self, fields: Fields, shape: StepShape, arrived: torch.Tensor | None) -> None:
        rows = fields.sampled if self._link.last else None
        hidden = self._forward(fields, rows, shape.width or shape.tokens, arrived=arrived)
        self._hidden[: len(hidden)].copy_(hidden)

    def _forward(
        self,
        f: Fields,
        rows: torch.Tensor | None,
        longest: int,
        host_lens: HostLens | None = None,
        arrived: torch.Tensor | None = None,
        shared: int = 0,
        step: FlatBatch | None = None,
    ) -> torch.Tensor:
        """Runs the model. Without `host_lens`, the work is the same for every step of this size, and may be recorded.

        Rows of the `step` with drafts leave their states to `DraftedStates`. Attention that cannot be recorded gets its lengths.
        """
        self._tables.enter(f.places, f.blocks)
        self._positions.locate(f, self._tables.tables)
        query_blocks = f.query_blocks if len(f.query_blocks) else None
        tables = [table.index_select(0, f.slots) for table in self._tables.tables]
        metadata = [
            AttentionMetadata(
                f.positions, f.targets[g], f.query_start, f.context_lens, table, longest, shared, host_lens, query_blocks
            )
            for g, table in enumerate(tables)
        ]
        if step is not None and self._in_flight.knows_lengths:
            lens = step.lens
            for each in metadata:
                each.exact_lens = lens
        if self._pages.has_state:
            metadata[-1].taken = f.query_start.diff()
            if step is not None:
                self._drafted.begin(step, metadata[-1])
        ids = f.ids[:-1].clamp(min=0) if self._drafter.active else f.ids[:-1]  # an OWN draft that is none is computed as some token
        hidden = self._model.forward(ids, self._pages.context(metadata, rows), arrived)
        self._by_library = any(each.by_library for each in metadata)
        return hidden

    def _head(self, f: Fields, hidden: torch.Tensor, most_drafts: int) -> None:
        """Samples behind the hidden states [S, hidden_size]; `most_drafts` as for the sampler."""
        self._sampler.sample(f, self._model.logits(hidden, self._sampler.logits(len(hidden))), most_drafts)


def _powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << exponent for exponent in range(most.bit_length())]


def _splitting_pays(pages: KVPages, step: FlatBatch, longest: int, room: int, num_sms: int) -> bool:
    """Returns whether a step with prompts takes less time as it comes than recorded, because it splits a decode's context further.

    A recorded one splits by the rows that it has room for: 257 rows with 8 key-value heads each are not split, those with one are
    split in two. A step that comes as it is splits by its own rows. The rule: what one program reads less then, over all layers,
    has to take longer than the host takes to launch their kernels. That is LONG_CONTEXT keys a layer.

    So a recorded step is taken where it has room for few rows, and where few heads are on a rank. Layers with windows read no more
    keys than these, and recurrent ones none. Latent attention splits by tokens, of which recorded steps have too many. `longest` is
    the longest possible context.
    """
    context = int(step.ends[step.ends - step.starts <= MAX_DECODE_TOKENS].max(initial=0))
    if context <= LONG_CONTEXT:
        return False
    saved = 0
    for layers, spec in ((len(group.layers) + len(group.readers), group.spec) for group in pages.groups):
        seen, most = (min(length, spec.window or length) for length in (context, longest))
        rows = num_sms * PROGRAMS_PER_SM if isinstance(spec, LatentSpec) else room
        saved += layers * keys_saved(seen, spec.num_kv_heads, most, sequences=len(step.slots), room=rows, sms=num_sms)
    return saved > LONG_CONTEXT * pages.num_layers


def _shared_blocks(pages: KVPages, batch: InputBatch, step: FlatBatch, *, recorded: bool) -> int:
    """Returns the leading blocks that all rows share, for attention to read once.

    With recorded steps, 0 unless reading them once saves more time than a recorded step does.
    """
    groups = pages.groups
    rows, size = len(step.slots), groups[0].spec.block_size
    full = [g for g, group in enumerate(groups) if not group.spec.window and group.layers]
    if rows < CASCADE_ROWS or not full:
        return 0
    computed = step.starts.astype(np.int32)
    width = int(computed.min()) // size
    saved = (rows - 1) * sum(groups[g].block_bytes for g in full)
    most = CASCADE_BYTES // saved if recorded else 0
    # Comparing whole tables takes long, so first the block of which they have to share more than all before.
    if width <= most or any(np.ptp(batch.tables[g][step.slots, most]) for g in full):
        return 0
    shared = min(common_prefix(batch.tables[g][step.slots, :width], computed, size) for g in full)
    return shared if shared > most else 0
