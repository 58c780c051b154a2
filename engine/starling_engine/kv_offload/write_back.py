"""Writes stored chunks to the secondary tiers, where other engines and a restart find them.

Writing takes processors from steps and is a bet on later requests: `WriteBackBudget` bounds it while requests run. Chunks that wait
are written while there is no request, unless they have left their slots by then.
"""

from collections import OrderedDict
from collections.abc import Iterable

from starling_engine.kv_offload.jobs import BATCH, TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkSlot
from starling_engine.kv_offload.policies import TransferCosts, WriteBackBudget
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import Chunk
from starling_engine.kv_offload.stats import OffloadStats

ORDER_SECONDS = 0.02
"""Time that one order may take from steps: they may begin at any moment, and it is not called back."""
CALM_SECONDS = 0.05
"""Time without a request after which none is expected the next moment."""
PAUSE = 5.0
"""Seconds without orders after one of which nothing was written."""


class WriteBack:
    """Chunks in slots that are to be written, one order after the other, so that most slots stay free for others."""

    def __init__(
        self,
        primary: PrimaryIndex,
        jobs: TransferJobs,
        costs: TransferCosts,
        budget: WriteBackBudget,
        stats: OffloadStats,
        *,
        enabled: bool,
    ) -> None:
        self.enabled = enabled
        """True if there are secondary tiers."""
        self._primary = primary
        self._jobs = jobs
        self._costs = costs
        self._budget = budget
        self._stats = stats
        self._unwritten: OrderedDict[Chunk, None] = OrderedDict()
        self._idle_since: float | None = None
        """Time since which there has been no request; None while there is one."""
        self._budgeted = True
        """False if the order under way was given while there was no request."""
        self._pause_end = 0.0

    @property
    def waiting(self) -> bool:
        """True if there is something to write, now or once the budget allows it."""
        return bool(self._unwritten) and self._jobs.clock() >= self._pause_end

    def write_next(self, *, idle: bool) -> None:
        """Orders some chunks to be written, if it is time now. `idle`: there is no request."""
        now = self._jobs.clock()
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._write(budgeted=self._idle_since is None or now - self._idle_since < CALM_SECONDS)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Chunks have been stored; those that have a slot by then are written."""
        if self.enabled:
            self._note(chunks)
            self._write_beside_steps()

    def complete(self, job: TransferJob, seconds: float) -> None:
        """Handles the answer to an order, which took `seconds` from steps."""
        written = [chunk for chunk, done in job.outcome.items() if done]
        self._costs.wrote(len(written), seconds)
        if self._budgeted:
            self._budget.spent(seconds)
        if not written:  # others would fail as well
            self._pause_end = self._jobs.clock() + PAUSE
        self._note(chunk for chunk, done in job.outcome.items() if not done)
        self._write_beside_steps()

    def clear(self) -> None:
        self._unwritten.clear()

    def _note(self, chunks: Iterable[Chunk]) -> None:
        """Remembers no more chunks than there are slots, the newest."""
        self._unwritten.update((chunk, None) for chunk in chunks)
        while len(self._unwritten) > self._primary.num_slots:
            self._unwritten.popitem(last=False)
            self._stats.left_unwritten()

    def _write_beside_steps(self) -> None:
        """Writes on, unless there was no request the last time: `write_next` knows whether one has come since."""
        if self._idle_since is None:
            self._write(budgeted=True)

    def _write(self, *, budgeted: bool) -> None:
        if not self.waiting or self._jobs.of("write_back") or (budgeted and not self._budget.allows):
            return
        chunks = self._next(min(self._batch_size(), self._primary.write_back_slots))
        if chunks:
            self._budgeted = budgeted
            self._jobs.order("write_back", [ChunkSlot(self._primary.pin(chunk), *chunk) for chunk in chunks])

    def _next(self, count: int) -> list[Chunk]:
        """Takes at most so many chunks, first those that have waited longest."""
        chunks: list[Chunk] = []
        while self._unwritten and len(chunks) < count:
            chunk, _ = self._unwritten.popitem(last=False)
            if self._primary.has(chunk):
                chunks.append(chunk)
            else:
                self._stats.left_unwritten()
        return chunks

    def _batch_size(self) -> int:
        """Chunks that take ORDER_SECONDS from steps; one where it is not known what a chunk takes."""
        one = self._costs.write
        if one is None:
            return 1
        return BATCH if not one else max(1, min(BATCH, int(ORDER_SECONDS / one)))
