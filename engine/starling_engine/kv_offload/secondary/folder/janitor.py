"""The folder's background thread: it reports what this process has written and, where it holds the lease, sweeps.

A sweep is one walk through the folder that counts all objects, and evicts the least recently used ones where there are too many.
Until the next one, the holder of the lease adds up what all processes report.
"""

import heapq
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from threading import Event, Thread

from starling_engine.byte_sizes import format_bytes
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, ObjectFile, remove_unused, walk_objects
from starling_engine.kv_offload.secondary.folder.usage import ABANDONED, Amount, FolderCount, FolderLease, FolderUsage, UsageReports

logger = logging.getLogger("starling.tiers")

INTERVAL = 1.0
"""Seconds between two ticks; at least a twentieth of it where one is woken, and five times as many after one has failed."""
RESCAN = 600.0
"""Seconds after which all is counted again: people and crashes change the folder, too."""
FULL = frozenset({ENOSPC, EDQUOT})
"""Error numbers of a full disk."""


class FolderJanitor:
    """`tick` is all its work; `start` makes a thread that repeats it. Other threads call `wake`."""

    def __init__(self, layout: FolderLayout, usage: FolderUsage, on_error: Callable[[OSError], None]) -> None:
        self._layout, self._usage, self._on_error = layout, usage, on_error
        self._lease, self._reports = FolderLease(layout), UsageReports(layout)
        self._holds_lease = self._stuck = False
        self._sweep: Iterator[None] | None = None
        self._swept_at = -math.inf
        self._stop, self._wake = Event(), Event()
        self._thread = Thread(target=self._run, name="kv-folder", daemon=True)
        self.evicted = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Has the thread release the lease. Waits for it a moment: it may hang with the disk."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def wake(self) -> None:
        """Ticks soon if there is something to evict, or more to report than a hundredth of the limit."""
        unreported = self._usage.written.bytes - self._reports.published.bytes
        if (self._holds_lease and self._usage.is_high) or unreported > self._usage.limit / 100:
            self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.tick()
            except OSError as error:
                self._on_error(error)
                self._stop.wait(4 * INTERVAL)
            self._wake.wait(0 if self._sweep else INTERVAL)
            self._stop.wait(INTERVAL / 20)  # however often it is woken: each tick writes the lease
            self._wake.clear()
        with suppress(OSError):
            self.leave()

    def tick(self) -> None:
        """Exchanges what is known with other processes and, with the lease, sweeps a while where that is due. Raises OSError."""
        self.look()
        self._holds_lease = self._lease.is_free
        try:
            self._exchange()
        except OSError as error:
            if error.errno not in FULL:  # eviction makes room for the lease, too
                raise
        if self._holds_lease:
            self._work()
        else:
            self._sweep, self._swept_at = None, -math.inf

    def leave(self) -> None:
        """Releases the lease, with the count. Raises OSError."""
        self._reports.publish(self._usage.written)
        if self._holds_lease:
            self._lease.publish(self._usage.count, released=True)

    # ---- what processes know ----

    def look(self) -> None:
        """Learns how much the folder holds, and how much its disk has room for. Raises OSError."""
        self._layout.make()
        count = self._lease.look()
        if count is not None:
            self._usage.count = count
        elif self._usage.count is None and not any(self._layout.objects.iterdir()):
            self._usage.count = FolderCount()
        self._fit_to_disk()

    def _fit_to_disk(self) -> None:
        disk = os.statvfs(self._layout.root)
        spare = min(1 << 30, min(self._usage.configured, disk.f_blocks * disk.f_frsize) // 100)  # bytes that others may need
        self._usage.fit(disk.f_bavail * disk.f_frsize - spare)

    def _exchange(self) -> None:
        self._reports.publish(self._usage.written)
        if self._holds_lease:
            if self._usage.count is not None:
                self._usage.count = self._usage.count.updated(self._reports.read())
            self._lease.publish(self._usage.count)

    # ---- the sweep ----

    def _work(self) -> None:
        """Sweeps for INTERVAL at most, a quarter of it at work: the processor and the disk are others' otherwise."""
        if self._sweep is None and self._is_sweep_due():
            self._sweep = self._walk()
        started = began = time.monotonic()
        for _ in self._sweep or ():
            self._stop.wait(min(3 * (time.monotonic() - began), INTERVAL))
            began = time.monotonic()
            if began > started + INTERVAL or self._stop.is_set():
                return
        self._sweep = None

    def _is_sweep_due(self) -> bool:
        return (self._usage.is_high and not self._stuck) or time.monotonic() - self._swept_at > RESCAN

    def _walk(self) -> Iterator[None]:
        """Counts all objects, evicts where there is too much, and removes leftovers; pauses at each `yield`. Raises OSError.

        What is written meanwhile is added: too much at worst, as the walk has found some of it, and never too little.
        """
        usage = self._usage
        written = self._reports.read() | {self._layout.writer: usage.written}
        held, others, oldest = Amount(), Amount(), Oldest(max(usage.excess(usage.now.bytes), usage.limit // 20))
        for folder in walk_objects(self._layout.objects):
            for found in folder:
                held += Amount(found.size, 1)
                if not self._layout.is_own(found):
                    others += Amount(found.size, 1)
                oldest.offer(found)
            yield
        usage.count = FolderCount(held, written).updated(self._reports.read())
        self._log_others(others)
        self._fit_to_disk()
        yield from self._evict(oldest, usage.excess(held.bytes))
        self._remove_abandoned()
        self._swept_at = time.monotonic()

    def _log_others(self, others: Amount) -> None:
        """Says at the first count what nothing here will read: after an upgrade somebody may wait for hits."""
        if others.objects and self._swept_at == -math.inf:
            logger.info(
                "the KV cache's folder %s holds %d objects (%s) of other models, settings or releases; "
                "they are left alone until room is needed (starling kv ls names them)",
                self._layout.root,
                others.objects,
                format_bytes(others.bytes),
            )

    def _evict(self, oldest: "Oldest", excess: int) -> Iterator[None]:
        """Removes objects of `excess` bytes, or as many as it can. Raises OSError."""
        before = self.evicted
        for found in oldest:
            if excess <= 0:
                break
            with suppress(PermissionError):  # another user's stays
                if remove_unused(found):
                    excess -= found.size
                    self.evicted += 1
                    self._usage.drop(found.size)
            yield
        self._stuck = excess > 0 and self.evicted == before

    def _remove_abandoned(self) -> None:
        """Removes what ended processes left. Ages are by the mount's clock: the lease has just been written. Raises OSError."""
        with suppress(FileNotFoundError):
            now = self._layout.lease.stat().st_mtime
            for folder in (self._layout.temporary, self._layout.writers):
                for path in folder.iterdir():
                    if now - path.stat().st_mtime > ABANDONED:
                        path.unlink()


class Oldest:
    """The least recently used objects, of `goal` bytes together or a little more: no list of all is needed to evict a few."""

    def __init__(self, goal: int) -> None:
        self._goal, self._bytes = goal, 0
        self._newest_first: list[tuple[int, ObjectFile]] = []

    def offer(self, found: ObjectFile) -> None:
        heapq.heappush(self._newest_first, (-found.used, found))
        self._bytes += found.size
        while self._newest_first and self._bytes - self._newest_first[0][1].size >= self._goal:
            self._bytes -= heapq.heappop(self._newest_first)[1].size

    def __iter__(self) -> Iterator[ObjectFile]:
        return iter(sorted(found for _, found in self._newest_first))
