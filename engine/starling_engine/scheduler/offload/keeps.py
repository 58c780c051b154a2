"""From slots to the tiers outside: what has come to slots from the device is written where others and a restart find it."""

from collections import OrderedDict
from collections.abc import Iterable

from starling_engine.scheduler.offload.jobs import Job, Jobs
from starling_engine.tiers.host import Chunk, HostIndex
from starling_engine.tiers.orders import ChunkAt, KeepChunks

KEEP_BATCH = 32
"""Chunks that are written outside by one order; there is one such order at a time."""


def most_kept(num_slots: int) -> int:
    """Of so many slots, those that may be pinned to be written outside, however long that takes."""
    return 1 + num_slots // 4


class Keeps:
    """In turns, so that most slots stay free to be used for others."""

    def __init__(self, host: HostIndex, jobs: Jobs) -> None:
        self._host = host
        self._jobs = jobs
        self._unkept: OrderedDict[Chunk, None] = OrderedDict()
        """Chunks in slots that are to be written."""
        self._failed: OrderedDict[Chunk, None] = OrderedDict()
        """Chunks that could not be: they are tried again with what is stored next, by when the tiers may be back."""

    def add(self, chunks: Iterable[Chunk]) -> None:
        """These have been stored, as far as they have a slot now."""
        self._unkept.update(self._failed)
        self._failed.clear()
        self._note(self._unkept, chunks)
        self._keep()

    def kept(self, job: Job, done: list[bool]) -> None:
        """An order has been answered."""
        for chunk in job.chunks:
            self._host.unpin(chunk)
        self._note(self._failed, (chunk for chunk, kept in zip(job.chunks, done, strict=True) if not kept))
        if any(done):  # else the rest would fail as well
            self._keep()

    def clear(self) -> None:
        self._unkept.clear()
        self._failed.clear()

    def _keep(self) -> None:
        if self._jobs.of(KeepChunks):
            return
        kept: list[Chunk] = []
        while self._unkept and len(kept) < min(KEEP_BATCH, most_kept(self._host.num_slots)):
            chunk, _ = self._unkept.popitem(last=False)
            if self._host.has(chunk):
                kept.append(chunk)
        if kept:
            order = KeepChunks(self._jobs.number(), [ChunkAt(self._host.pin(chunk), *chunk) for chunk in kept])
            self._jobs.add(Job(order, kept))

    def _note(self, notes: OrderedDict[Chunk, None], chunks: Iterable[Chunk]) -> None:
        """Of no more than there are slots, the newest."""
        notes.update((chunk, None) for chunk in chunks)
        while len(notes) > self._host.num_slots:
            notes.popitem(last=False)
