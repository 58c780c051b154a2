"""The folder's background thread: it reports what this process has written and, where it holds the lease, evicts.

The holder of the lease counts all objects now and then, and adds up what others report meanwhile. A sweep counts again, and evicts
the least recently used objects, in one walk through the folder.
"""

import heapq
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, ObjectFile, object_files, object_folders
from starling_engine.kv_offload.secondary.folder.lease import FolderLease, LeaseRecord
from starling_engine.kv_offload.secondary.folder.usage import ABANDONED, LOW, Amount, FolderUsage, UsageReports, growth

INTERVAL = 1.0
"""Seconds between two ticks; at least a twentieth of it where one is woken, and five times as many after one has failed."""
RESCAN = 600.0
"""Seconds after which all is counted again: people and crashes change the folder, too."""
RETRY = 120.0
"""Seconds until a full disk is expected to have room again, and until eviction is tried again that could remove nothing."""
SWEEP_SHARE = 0.25
"""Share of the time in which a sweep works; it leaves the processor and the disk to others otherwise."""
FULL = frozenset({ENOSPC, EDQUOT})
"""Error numbers of a full disk."""

Item = TypeVar("Item")


class _SweepCancelled(Exception):
    """The janitor stops, or the lease was lost."""


class FolderJanitor:
    """`tick` is all its work; `start` makes a thread that repeats it. Other threads call `wake` and `on_disk_full`."""

    def __init__(self, layout: FolderLayout, usage: FolderUsage, on_error: Callable[[OSError], None]) -> None:
        self._layout, self._usage, self._on_error = layout, usage, on_error
        self._lease, self._reports = FolderLease(layout), UsageReports(layout)
        self._others: dict[str, Amount] | None = None
        """Reports that the holder of the lease has added up; None in other processes."""
        self._learnt: LeaseRecord | None = None
        """Another holder's record that was learnt from."""
        self._disk_full = self._stuck = False
        self._swept_at, self._shrunk_at = -math.inf, -math.inf
        self._renewed_at = 0.0
        self._stop, self._wake = Event(), Event()
        self._thread = Thread(target=self._run, name="kv-folder", daemon=True)
        self.holds_lease = False
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
        if (self.holds_lease and self._usage.is_high) or unreported > self._usage.limit / 100:
            self._wake.set()

    def on_disk_full(self) -> None:
        self._disk_full = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = INTERVAL
            try:
                self.tick()
            except OSError as error:
                self._on_error(error)
                pause = 5 * INTERVAL
            self._wake.wait(pause)
            self._stop.wait(INTERVAL / 20)  # however often it is woken: each tick writes the lease
            self._wake.clear()
        with suppress(OSError):
            self.leave()

    def tick(self) -> None:
        """Renews the lease, exchanges reports, and sweeps where that is due. Raises OSError."""
        self._layout.make()
        if not self._usage.is_known and self._layout.is_empty():
            self._usage.set_counted(Amount(), Amount())
        if not self._renew_lease():
            self._follow()
            return
        if self._others is None:  # goes on from what the last holder knew, until a sweep has counted
            self._others, self._swept_at = self._reports.of_others(), -math.inf
        if self._is_sweep_due():
            with suppress(_SweepCancelled):
                self._sweep()
                self._remove_abandoned()
        self._reports.publish(self._usage.written)

    def leave(self) -> None:
        """Releases the lease, with the count. Raises OSError."""
        self._reports.publish(self._usage.written)
        self._lease.release(self._known_amount)

    @property
    def _known_amount(self) -> Amount | None:
        return self._usage.now if self._usage.is_known else None

    # ---- the lease ----

    def _renew_lease(self) -> bool:
        """Adds up what others report and publishes it with the lease. Returns whether this process is to evict. Raises OSError.

        Without room on the disk for the lease, its holder evicts, or the process that was about to become it.
        """
        if self.holds_lease and self._others is not None:
            reports = self._reports.of_others()
            self._usage.add_counted(growth(self._others, reports))
            self._others |= reports
        self._renewed_at = time.monotonic()
        try:
            self.holds_lease = self._lease.acquire_or_renew(self._known_amount)
        except OSError as error:
            if error.errno not in FULL or not (self.holds_lease or self._lease.is_new):
                raise
            self._disk_full = True
            return True
        return self.holds_lease

    def _follow(self) -> None:
        """Learns the holder's count, and adds what it cannot know yet. Raises OSError."""
        published, record = self._reports.published, self._lease.other
        self._others = None
        self._reports.publish(self._usage.written)
        if record is not None and record != self._learnt and record.amount is not None:
            self._learnt = record
            self._usage.set_counted(record.amount, published)

    # ---- the sweep ----

    def _is_sweep_due(self) -> bool:
        disk, age = os.statvfs(self._layout.root), time.monotonic() - self._swept_at
        spare = min(1 << 30, self._usage.limit // 100)  # bytes that stay free on the disk
        self._disk_full |= disk.f_bavail * disk.f_frsize < spare
        if self._disk_full or self._usage.is_high:
            return age > RETRY or not self._stuck
        return age > (RETRY if self._usage.is_shrunk else RESCAN)

    def _sweep(self) -> None:
        """Counts all objects, and evicts where there is too much. Raises _SweepCancelled, OSError.

        What is written meanwhile is added: too much at worst, as the walk has found some of it, and never too little.
        """
        usage, disk_full, self._disk_full = self._usage, self._disk_full, False
        written, others = usage.placed, self._reports.of_others()
        known = usage.now.bytes
        held, oldest = self._count(max(known - self._wanted(known, disk_full), usage.limit - usage.low_water))
        self._others = self._reports.of_others()
        usage.set_counted(held + growth(others, self._others), written)
        excess = held.bytes - self._wanted(held.bytes, disk_full)
        before = self.evicted
        self._evict(oldest, excess)
        self._stuck = excess > 0 and self.evicted == before
        self._swept_at = time.monotonic()
        if disk_full:
            usage.shrink()
            self._shrunk_at = self._swept_at
        elif self._swept_at - self._shrunk_at > RETRY:
            usage.restore()

    def _wanted(self, held: int, disk_full: bool) -> int:
        """Returns how many of `held` bytes may stay."""
        wanted = self._usage.low_water if held > self._usage.high_water else held
        return min(wanted, int(LOW * held)) if disk_full else wanted

    def _count(self, excess: int) -> tuple[Amount, "Oldest"]:
        """Returns what the folder holds, and its oldest objects of `excess` bytes."""
        held, largest, oldest = Amount(), 0, Oldest(excess)
        for folder in self._paced(object_folders(self._layout.objects)):
            for found in object_files(folder):
                held += Amount(found.size, 1)
                largest = max(largest, found.size)
                oldest.offer(found)
        self._usage.note_size(largest)
        return held, oldest

    def _evict(self, oldest: Iterable[ObjectFile], excess: int) -> None:
        """Removes objects of `excess` bytes, or as many as it can. Raises _SweepCancelled, OSError."""
        for found in self._paced(oldest):
            if excess <= 0:
                break
            if evict(found):
                excess -= found.size
                self.evicted += 1
                self._usage.add_counted(Amount(-found.size, -1))

    def _paced(self, items: Iterable[Item]) -> Iterator[Item]:
        """Passes items on, with pauses between them, and renews the lease meanwhile. Raises _SweepCancelled, OSError."""
        began = time.monotonic()
        for item in items:
            yield item
            worked = time.monotonic() - began
            if time.monotonic() - self._renewed_at > INTERVAL and not self._renew_lease():
                raise _SweepCancelled
            if worked > 0.005:
                self._stop.wait(min(worked * (1 / SWEEP_SHARE - 1), INTERVAL))
                began = time.monotonic()
            if self._stop.is_set():
                raise _SweepCancelled

    def _remove_abandoned(self) -> None:
        """Removes what ended processes left. Ages are by the mount's clock: the lease has just been written. Raises OSError."""
        try:
            now = self._layout.lease.stat().st_mtime
        except FileNotFoundError:
            return
        for folder in (self._layout.temporary, self._layout.writers):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if self._layout.is_abandoned(entry) or now - entry.stat().st_mtime > ABANDONED:
                            Path(entry.path).unlink()


class Oldest:
    """The least recently used objects, of `goal` bytes together or a little more: no list of all is needed to evict a few."""

    def __init__(self, goal: int) -> None:
        self._goal, self._bytes = goal, 0
        self._newest_first: list[tuple[int, ObjectFile]] = []

    def offer(self, found: ObjectFile) -> None:
        enough = self._bytes >= self._goal
        if enough and (not self._newest_first or found.used >= -self._newest_first[0][0]):
            return
        heapq.heappush(self._newest_first, (-found.used, found))
        self._bytes += found.size
        while self._bytes - self._newest_first[0][1].size >= self._goal:
            self._bytes -= heapq.heappop(self._newest_first)[1].size

    def __iter__(self) -> Iterator[ObjectFile]:
        return iter(sorted(found for _, found in self._newest_first))


def evict(found: ObjectFile) -> bool:
    """Removes an object, unless it has been read since it was found. Returns whether it is gone; another user's stays.

    Raises OSError.
    """
    try:
        path = Path(found.path)
        if path.stat().st_mtime_ns != found.used:
            return False
        path.unlink()
    except PermissionError:
        return False
    except FileNotFoundError:
        pass
    return True
