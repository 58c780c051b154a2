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
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import MAX_DECODE_ROWS, MAX_DECODE_TOKENS, common_prefix
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.sampling.select import SampleOp
from starling_engine.step import StepPlan, StepResult
from starling_engine.worker.device.device_drafter import DeviceDrafter, NgramDrafter
from starling_engine.worker.device.device_positions import DevicePositions
from starling_engine.worker.device.device_sampler import DeviceSampler
from starling_engine.worker.device.device_tables import DeviceTables
from starling_engine.worker.device.extra_outputs import ExtraOutputs
from starling_engine.worker.device.graphs import Graphs
from starling_engine.worker.device.in_flight import InFlight
from starling_engine.worker.device.step_buffer import StepShape
from starling_engine.worker.device.step_writer import NO_SAMPLES, Fields, StepWriter
from starling_engine.worker.host.batch import FlatBatch, InputBatch, Samples
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.masks import StepMasking
from starling_engine.worker.pending_step import PendingStep
from starling_engine.worker.prompt_outputs import NoModel, RunnableModel
from starling_engine.worker.stage import StageLink

CASCADE_ROWS = 8
CASCADE_BYTES = 16 << 30
"""Bytes of the cache that one step reads in about the time in which the host launches its kernels one by one."""

LONG_CONTEXT = 32 << 10
"""Tokens of a decode beside a prompt: more of them take longer to read unsplit than the host takes to launch the step's kernels."""


class DeviceRunner:
    """See `Runner`. With `recorded`, steps of usual sizes run as graphs; `tick` is called as each has been recorded.

    `cascades`: attention can use `AttentionMetadata.shared_blocks`. With `own_drafts`, plans may have OWN drafts, by prompt lookup.
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
        cascades: bool,
        own_drafts: SpeculativeConfig | None,
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
        self._late: LateKernels | None = None
        self._tables = DeviceTables(batch, queue, device)
        self._writer = StepWriter(batch, queue, device, max_tokens, max_samples)
        self._positions = DevicePositions(rows, batch.block_size, device)
        self._drafter = DeviceDrafter()
        if own_drafts is not None:
            self._drafter = NgramDrafter(own_drafts, batch, self._positions, queue, device)
        self._sampler = DeviceSampler(op, max_samples, vocab_size, self._positions)
        self._extra_outputs = ExtraOutputs(batch, self._sampler, queue, device, masking)
        self._use(model)
        self._in_flight = InFlight(batch, queue, self._sampler.out)
        longest = min(max_tokens, self._writer.longest)
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
        self._tables.apply(plan, self._batch.table_lengths)
        self._pages.copy(plan)
        step = self._batch.gather(plan)
        result = StepResult(plan.step_id, plan.epoch, compiled=self._late.take() if self._late is not None else 0)
        result.eager = self._graphs.not_recorded if self._graphs is not None else 0
        if not self._link.last:
            self._run_stage(plan, step)
            return self._in_flight.add(result, NO_SAMPLES, began)
        result.counts = [0] * len(plan.slots)
        samples = step.samples(self._batch.sampling_rows(plan))
        fields, hidden = self._run(plan, step, samples)
        readback = self._extra_outputs.serve(plan, step, samples, fields, hidden, result)
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

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)

    def record(self) -> None:
        """Records steps of all sizes, made of padding alone."""
        if self._graphs is not None:
            gc.collect()
            with no_collection():
                for shape in self._graphs.shapes:
                    self._graphs.run(shape, self._work(self._writer.padding(shape), shape))
                    self._tick()

    def warm(self) -> None:
        """Runs what is neither recorded nor the largest step, once, so that every kernel has been met: of padding alone."""
        rows = min(self._max_rows, self._max_tokens, self._max_samples)
        # Rows of few tokens, up to those that are prompts in any tiles; and the fewer rows, the more segments have their contexts.
        widths = [1 << exponent for exponent in range(MAX_DECODE_ROWS.bit_length() + 1)]
        counts = [1 << exponent for exponent in range(rows.bit_length())]
        for width, count in sorted({*itertools.product(widths, (1, rows)), *itertools.product((1, widths[-1]), counts)}):
            tokens = min(width, self._max_tokens, self._writer.longest)  # all in the first row: none is left undefined
            self._forward(self._writer.padding(StepShape(tokens, count, 1)), None, tokens, arrived=self._blank(tokens))
            self._tick()
        if self._cascades and rows >= CASCADE_ROWS:
            fields = self._writer.padding(StepShape(rows, rows, rows, width=1))
            for exponent in range((self._tables.width - 1).bit_length()):
                self._forward(fields, None, 1, arrived=self._blank(rows), shared=1 << exponent)
                self._tick()

    def on_sleep(self) -> None:
        self._use(NoModel())
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
        fields = self._writer.write(plan, step, samples, shape or StepShape(tokens, len(step.slots), count))
        self._drafter.propose(plan, fields)
        sampled, most_drafts = fields.samples(len(samples.rows), count), int(step.drafts.max())
        if shape is not None:
            self._replay(shape, fields, tokens)
            if count and not shape.width:
                self._head(sampled, self._hidden[:count], most_drafts)
            return sampled, None
        arrived = self._link.receive(tokens)
        hidden = self._forward(fields, None if decode or every else sampled.sampled, step.longest, step, arrived, shared)
        if count:
            self._head(sampled, hidden.index_select(0, sampled.sampled) if every else hidden, most_drafts)
        return sampled, hidden if every else None

    def _run_stage(self, plan: StepPlan, step: FlatBatch) -> None:
        """Runs a step in a stage before the last: all tokens' states go to the next one."""
        tokens = len(step.ids)
        shape = self._recorded(step, decode=True)
        fields = self._writer.write(plan, step, NO_SAMPLES, shape or StepShape(tokens, len(step.slots), 0))
        if shape is not None:
            self._replay(shape, fields, tokens)
            # The next replay does not wait until these have been sent.
            self._link.send(self._hidden[:tokens].clone())
            return
        self._link.send(self._forward(fields, None, step.longest, step, self._link.receive(tokens)))

    def _recorded(self, step: FlatBatch, *, decode: bool) -> StepShape | None:
        """Returns the smallest recorded size with room for the step; None where it takes less time as it comes.

        `decode`: all its tokens are sampled behind, or none is.
        """
        if self._graphs is None:
            return None
        tokens = len(step.ids)
        shape = self._graphs.decode(tokens, step.longest) if decode else None
        if shape is not None or _has_long_decode(step):
            return shape
        return self._graphs.mixed(tokens, len(step.slots))

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
        step: FlatBatch | None = None,
        arrived: torch.Tensor | None = None,
        shared: int = 0,
    ) -> torch.Tensor:
        """Runs the model. Without `step`, the work is the same for every step of this size, and may be recorded."""
        host_lens = step.host_lens if step is not None else None
        self._positions.locate(f, self._tables.tables)
        tables = [table.index_select(0, f.slots) for table in self._tables.tables]
        metadata = [
            AttentionMetadata(f.positions, f.targets[g], f.query_start, f.context_lens, table, longest, shared, host_lens)
            for g, table in enumerate(tables)
        ]
        ids = f.ids[:-1].clamp(min=0) if self._drafter.active else f.ids[:-1]  # an OWN draft that is none is computed as some token
        return self._model.forward(ids, self._pages.context(metadata, rows), arrived)

    def _head(self, f: Fields, hidden: torch.Tensor, most_drafts: int) -> None:
        """Samples behind the hidden states [S, hidden_size]; `most_drafts` as for the sampler."""
        self._sampler.sample(f, self._model.logits(hidden, self._sampler.logits(len(hidden))), most_drafts)


def _has_long_decode(step: FlatBatch) -> bool:
    """Returns whether a row of few tokens has a long context. A recorded step with prompts has room for so many rows that none is
    split; one that is launched kernel by kernel has its own alone.
    """
    return bool(((step.ends - step.starts <= MAX_DECODE_TOKENS) & (step.ends > LONG_CONTEXT)).any())


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
    saved = (rows - 1) * sum(len(groups[g].layers) * groups[g].spec.layer_block_bytes for g in full)
    most = CASCADE_BYTES // saved if recorded else 0
    # Comparing whole tables takes long, so first the block of which they have to share more than all before.
    if width <= most or any(np.ptp(batch.tables[g][step.slots, most]) for g in full):
        return 0
    shared = min(common_prefix(batch.tables[g][step.slots, :width], computed, size) for g in full)
    return shared if shared > most else 0
