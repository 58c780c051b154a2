"""From slots to the tiers outside: what has come to slots from the device is written where others and a restart find it.

Writing takes processors, and it is a bet: as long as nothing is found outside, steps on the same processors lose a small share of
them to it at most. What is put off is written when there is no request, unless it has left its slot by then.
"""

from collections import OrderedDict
from collections.abc import Iterable

from starling_engine.kv_offload.costs import Costs
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkSlot, WriteBackChunks
from starling_engine.kv_offload.primary import Chunk, PrimaryIndex
from starling_engine.kv_offload.secondary.breaker import Breaker
from starling_engine.kv_offload.stats import OffloadStats

KEEP_BATCH = 32
"""Chunks that are written outside by one order; there is one such order at a time."""
AT_ONCE = 0.02
"""Seconds that one order is to take from steps: they may begin at any moment, and it is not called back."""
CALM = 0.05
"""Seconds without a request after which none is expected the next moment."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds for which nothing is tried after an order of which nothing was written, and after each further one twice as long."""


def most_kept(num_slots: int) -> int:
    """Of so many slots, those that may be pinned to be written outside, however long that takes."""
    return 1 + num_slots // 4


class WriteBack:
    """In turns, so that most slots stay free to be used for others."""

    def __init__(self, host: PrimaryIndex, jobs: TransferJobs, costs: Costs, counts: OffloadStats) -> None:
        self._host = host
        self._jobs = jobs
        self._costs = costs
        self._counts = counts
        self._unkept: OrderedDict[Chunk, None] = OrderedDict()
        """Chunks in slots that are to be written."""
        self._idle_since: float | None = None
        """Since when there has been no request; None while there is one."""
        self._free = False
        """Whether the order under way was given while there was none."""
        self._count = 0
        """Chunks of the last order."""
        self._breaker = Breaker(FIRST_PAUSE, LONGEST_PAUSE, jobs.now)

    @property
    def waiting(self) -> bool:
        """Whether there is something to write, now or once steps can do without what that takes."""
        return bool(self._unkept) and not self._breaker.remaining

    def go_on(self, *, idle: bool) -> None:
        """Has some chunks written, if it is time now. `idle`: there is no request."""
        now = self._jobs.now()
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._keep(free=self._idle_since is not None and now - self._idle_since >= CALM)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """These have been stored, as far as they have a slot now."""
        self._note(chunks)
        self._keep_beside_steps()

    def kept(self, job: TransferJob, done: list[bool], taken: float) -> None:
        """An order has been answered."""
        for chunk in job.chunks:
            self._host.unpin(chunk)
        self._costs.kept(sum(done), taken, free=self._free)
        if any(done):
            self._breaker.close()
            self._breaker.worked()
        else:  # others would fail as well
            self._breaker.trip()
        self._note(chunk for chunk, kept in zip(job.chunks, done, strict=True) if not kept)
        self._keep_beside_steps()

    def clear(self) -> None:
        self._unkept.clear()

    def _note(self, chunks: Iterable[Chunk]) -> None:
        """Of no more than there are slots, the newest."""
        self._unkept.update((chunk, None) for chunk in chunks)
        while len(self._unkept) > self._host.num_slots:
            self._unkept.popitem(last=False)
            self._counts.left_unwritten(1)

    def _keep_beside_steps(self) -> None:
        """Not if there was no request the last time: there may be one since, of which `go_on` will tell."""
        if self._idle_since is None:
            self._keep(free=False)

    def _keep(self, *, free: bool) -> None:
        if not self.waiting or self._jobs.of(WriteBackChunks) or not (free or self._costs.may_keep):
            return
        kept = self._next(min(self._at_once(), most_kept(self._host.num_slots)))
        if kept:
            self._free, self._count = free, len(kept)
            order = WriteBackChunks(self._jobs.number(), [ChunkSlot(self._host.pin(chunk), *chunk) for chunk in kept])
            self._jobs.add(TransferJob(order, kept))

    def _next(self, count: int) -> list[Chunk]:
        """At most so many, those first that have waited longest."""
        kept: list[Chunk] = []
        while self._unkept and len(kept) < count:
            chunk, _ = self._unkept.popitem(last=False)
            if self._host.has(chunk):
                kept.append(chunk)
            else:
                self._counts.left_unwritten(1)
        return kept

    def _at_once(self) -> int:
        """Chunks, as many as do not take too long, as far as that is known: those that are there already take less than others."""
        most = min(2 * self._count or 1, KEEP_BATCH)
        one = self._costs.keep
        return most if not one else max(1, min(most, int(AT_ONCE / one)))
