"""Runs plans on a device that works on its own: a step is queued while the one before still runs.

The tokens that a step samples stay on the device, where the next one finds them; the host learns them by one copy, when it takes
the result.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from starling_engine.attention.base import AttentionMetadata
from starling_engine.kernels.attention_plan import common_prefix
from starling_engine.platforms.queue import DeviceQueue
from starling_engine.sampling.select import SampleOp
from starling_engine.step import RowResult, StepPlan
from starling_engine.worker.batch import Gathered, InputBatch
from starling_engine.worker.device_tables import DeviceTables
from starling_engine.worker.graphs import Graphs
from starling_engine.worker.launched import Launched
from starling_engine.worker.on_device import OnDevice
from starling_engine.worker.pages import KVPages
from starling_engine.worker.pinned import PinnedRing
from starling_engine.worker.sampler import add_logprobs, adjust_rows
from starling_engine.worker.special import Model, NoModel, Special
from starling_engine.worker.stage import StageLink
from starling_engine.worker.step_buffer import Shape
from starling_engine.worker.step_writer import Fields, StepWriter

CASCADE_ROWS = 8
CASCADE_BYTES = 16 << 30
"""Of the cache, read by one step: about the time in which the host launches the kernels of a step one by one."""


class DeviceRunner:
    """See `Runner`. With `recorded`, steps of usual sizes run as graphs; `tick` is called as each has been recorded.

    `cascades` says whether attention has use for `AttentionMetadata.shared_blocks`.
    """

    def __init__(
        self,
        model: Model,
        pages: KVPages,
        batch: InputBatch,
        op: SampleOp,
        tick: Callable[[], None],
        link: StageLink,
        queue: DeviceQueue,
        *,
        max_tokens: int,
        recorded: bool,
        cascades: bool,
    ) -> None:
        self._pages = pages
        self._batch = batch
        self._op = op
        self._tick = tick
        self._link = link
        self._queue = queue
        self._use(model)
        device, rows = pages.device, len(batch.occupants)
        self._max_tokens = max_tokens
        self._max_rows = rows
        self._cascades = cascades
        self._tables = DeviceTables(batch, queue, device)
        self._writer = StepWriter(batch, queue, device, max_tokens)
        self._last = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """The token that was sampled last in each slot."""
        self._out = torch.zeros(rows + 1, 2, dtype=torch.int64, device=device)
        """Tokens that were sampled, and whether their logits are finite."""
        self._outputs = PinnedRing(queue, self._out.nbytes)
        self._hidden: torch.Tensor | None = None
        """[rows + 1, hidden_size]: where recorded steps leave the states that are sampled from."""
        self._graphs = Graphs(queue, rows, min(max_tokens, self._writer.longest)) if recorded else None
        self._newest: OnDevice | None = None
        self._open: deque[OnDevice] = deque()
        """Steps whose tokens the batch does not have yet."""

    # ---- a step ----

    def launch(self, plan: StepPlan) -> Launched:
        began = time.perf_counter()
        self._absorb(wait=any(slot in self._batch.special for slot in plan.slots))
        self._batch.apply(plan)
        self._tables.apply(plan, self._batch.table_lengths)
        self._pages.copy(plan)
        step = self._batch.gather(plan)
        rows = [RowResult() for _ in plan.slots]
        if not self._link.last:
            arrived = self._link.receive(len(step.ids))
            fields = self._writer.write(plan, step, [], Shape(len(step.ids), len(step.slots)))
            self._link.send(self._forward(fields, None, step.longest, step, arrived))
            return self._launched(plan, step, [], [], began)
        sampled = [r for r, wanted in enumerate(plan.sample) if wanted and self._batch.occupant(plan.slots[r]).pooling is None]
        if self._batch.special and any(slot in self._batch.special for slot in plan.slots):
            self._run_special(plan, step, sampled, rows)
        else:
            self._run(plan, step, sampled)
        return self._launched(plan, step, sampled, rows, began)

    def free_slot(self, slot: int) -> None:
        self._batch.leave(slot)

    def record(self) -> None:
        """Records all sizes, with steps of padding alone."""
        if self._graphs is not None:
            for shape in self._graphs.shapes:
                self._graphs.run(shape, self._work(self._writer.padding(shape), shape))
                self._tick()

    def on_sleep(self) -> None:
        self._use(NoModel())
        self._hidden = None
        if self._graphs is not None:
            self._graphs.forget()

    def on_wake(self, model: Model) -> None:
        """Steps are recorded anew as they come: nobody who wakes the engine waits for that."""
        self._use(model)

    def _use(self, model: Model) -> None:
        self._model = model
        self._special = Special(model, self._batch)

    def peak_bytes(self) -> int | None:
        """Memory that steps take besides weights and cache; None where it cannot be measured."""
        largest = self._queue.peak_bytes(partial(self._run_largest, self._max_tokens, self._max_rows))
        if largest is None or self._graphs is None:
            return largest
        # Recorded steps have memory of their own, which all of them share.
        top = self._graphs.shapes[0].tokens
        return largest + (self._queue.peak_bytes(partial(self._run_largest, top, min(top, self._max_rows))) or 0)

    def _run_largest(self, tokens: int, rows: int) -> None:
        """A step of padding alone, all rows of which are sampled from."""
        longest = self._writer.longest
        tokens = min(tokens, self._max_rows * longest)
        fields = self._writer.padding(Shape(tokens, -(-tokens // longest)))
        hidden = self._forward(fields, None, min(tokens, longest), arrived=self._link.blank(tokens))
        if self._link.last:
            self._head(self._writer.padding(Shape(rows, rows, decode=True)), hidden[:1].expand(rows, -1).contiguous())

    # ---- its parts ----

    def _run(self, plan: StepPlan, step: Gathered, sampled: list[int]) -> None:
        tokens, count = len(step.ids), len(sampled)
        decode = step.longest == 1 and count == tokens
        shared = self._shared(step)
        graphs, shape = self._graphs, None
        if graphs is not None and not shared:
            shape = graphs.decode(tokens) if decode else graphs.mixed(tokens, len(step.slots))
        if graphs is not None and shape is not None:
            fields = self._writer.write(plan, step, sampled, shape)
            graphs.run(shape, self._work(fields, shape))
            if shape.decode or not count:
                return
            assert self._hidden is not None
            self._head(fields.samples(count), self._hidden.index_select(0, fields.sampled[:count]))
            return
        fields = self._writer.write(plan, step, sampled, Shape(tokens, len(step.slots)))
        arrived = self._link.receive(tokens)
        rows = None if decode else fields.last.index_select(0, fields.sampled[:count])
        hidden = self._forward(fields, rows, step.longest, step, arrived, shared)
        if count:
            self._head(fields.samples(count), hidden)

    def _run_special(self, plan: StepPlan, step: Gathered, sampled: list[int], results: list[RowResult]) -> None:
        """Some rows want more than a token: what they want is read from the device at once."""
        fields = self._writer.write(plan, step, sampled, Shape(len(step.ids), len(step.slots)))
        arrived = self._link.receive(len(step.ids))
        every = self._batch.reads_prompts(plan.slots)
        picked = fields.last.index_select(0, fields.sampled[: len(sampled)])
        hidden = self._forward(fields, None if every else picked, step.longest, step, arrived)
        if sampled:
            slots, ends = [plan.slots[r] for r in sampled], step.ends[sampled]
            logits = self._model.logits(hidden.index_select(0, picked) if every else hidden)
            raw = adjust_rows(logits, self._batch, slots, ends)
            chosen = self._sample(fields.samples(len(sampled)), logits)
            of_samples = [RowResult() for _ in sampled]
            add_logprobs(of_samples, logits, raw, chosen, self._batch, slots)
            for r, row in zip(sampled, of_samples, strict=True):
                results[r] = row
        self._special.serve(plan, step.query_end - 1, hidden, results)

    def _work(self, fields: Fields, shape: Shape) -> Callable[[], None]:
        """What is recorded: a whole step of decodes, or one with prompts up to the states of each row's last token."""
        if shape.decode:
            return lambda: self._head(fields, self._forward(fields, None, 1))
        return partial(self._keep_hidden, fields, shape)

    def _keep_hidden(self, fields: Fields, shape: Shape) -> None:
        hidden = self._forward(fields, fields.last, shape.tokens)
        if self._hidden is None:
            self._hidden = torch.empty_like(hidden)
        self._hidden.copy_(hidden)

    def _shared(self, step: Gathered) -> int:
        """Leading blocks that all rows share, where to read them once for all saves more than a recorded step does."""
        if not self._cascades:
            return 0
        groups = self._pages.groups
        rows, size = len(step.slots), groups[0].spec.block_size
        full = [g for g, group in enumerate(groups) if not group.spec.window]
        if rows < CASCADE_ROWS or not full or len(set(self._batch.tables[full[0]][step.slots, 0])) > 1:
            return 0
        computed = (step.ends - np.diff(step.query_end, prepend=0)).astype(np.int32)
        width = int(computed.min()) // size
        shared = min(common_prefix(self._batch.tables[g][step.slots, :width], computed, size) for g in full)
        page_bytes = sum(len(groups[g].layers) * groups[g].spec.page_bytes for g in full)
        return shared if shared * (rows - 1) * page_bytes > CASCADE_BYTES or self._graphs is None else 0

    def _forward(
        self,
        f: Fields,
        rows: torch.Tensor | None,
        longest: int,
        step: Gathered | None = None,
        arrived: torch.Tensor | None = None,
        shared: int = 0,
    ) -> torch.Tensor:
        """Without `step`, all that is asked of the device holds for every step of this size: it may be recorded."""
        host_lens = step.host_lens if step is not None else None
        f.ids.index_copy_(0, f.feed_at, self._last.index_select(0, f.feed_slots))
        tables = [table.index_select(0, f.slots) for table in self._tables.tables]
        metadata = [
            AttentionMetadata(f.positions, f.targets[g], f.query_start, f.context_lens, table, longest, shared, host_lens)
            for g, table in enumerate(tables)
        ]
        return self._model.forward(f.ids[:-1], self._pages.context(metadata, rows), arrived)

    def _head(self, f: Fields, hidden: torch.Tensor) -> None:
        self._sample(f, self._model.logits(hidden))

    def _sample(self, f: Fields, logits: torch.Tensor) -> torch.Tensor:
        chosen = self._op(logits, f.temperature, f.top_k, f.top_p, f.min_p, f.seeds, f.ends)
        self._last.index_copy_(0, f.sampled_slots, chosen)
        out = self._out[: len(chosen)]
        out[:, 0].copy_(chosen)
        out[:, 1].copy_(torch.isfinite(logits.gather(1, chosen[:, None])[:, 0]))
        return chosen

    # ---- what comes of it ----

    def _launched(self, plan: StepPlan, step: Gathered, sampled: list[int], rows: list[RowResult], began: float) -> OnDevice:
        count = len(sampled)
        host = self._outputs.take()[: 2 * 8 * count].view(torch.int64).view(count, 2)
        if count:
            host.copy_(self._out[:count], non_blocking=True)
        launched = self._newest = OnDevice(plan, began, self._outputs.given(), rows, self._newest)
        if count:
            launched.sampled, launched.output = sampled, host
            launched.places = [
                (plan.slots[r], self._batch.occupant(plan.slots[r]), int(end))
                for r, end in zip(sampled, step.ends[sampled], strict=True)
            ]
            self._open.append(launched)
        return launched

    def _absorb(self, *, wait: bool) -> None:
        """Writes tokens that have come into the batch, whose requests may be others by now; with `wait`, all of them."""
        while self._open and (wait or self._open[0].tokens is not None):
            launched = self._open.popleft()
            launched.wait()
            assert launched.tokens is not None
            for token, (slot, occupant, end) in zip(launched.tokens, launched.places, strict=True):
                if self._batch.occupants[slot] is occupant:
                    self._batch.tokens[slot, end] = token
