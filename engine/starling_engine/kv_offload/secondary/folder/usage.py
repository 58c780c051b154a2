"""Amount of data in the folder: what was counted once, and what all processes that share it have written since.

Each process reports what it has written, in a file of its own. The one with the lease adds the reports up, publishes the sum, and
evicts. The lease is for economy: a sweep costs the same however many do it, and two at once would only evict the same files. So a
renamed file is enough, where locks of shared mounts are not. Each process judges its age by its own clock: those of nodes differ.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock

import msgspec

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout

HIGH, LOW = 0.98, 0.95
"""Shares of the limit at which eviction begins and ends, or sooner where the next object would find no room."""
ABANDONED = 600.0
"""Seconds after which a file that no process has touched is taken for a leftover."""
DURATION = 15.0
"""Seconds without a renewal after which another process may take the lease."""


class Amount(msgspec.Struct, frozen=True, array_like=True):
    """Number of objects, and the bytes of their files."""

    bytes: int = 0
    objects: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.objects + other.objects)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes - other.bytes, self.objects - other.objects)


class FolderCount(msgspec.Struct, frozen=True):
    """The folder held `held` when each process had written the amount that `written` has under its name."""

    held: Amount = Amount()
    written: dict[str, Amount] = {}

    def updated(self, reports: Mapping[str, Amount]) -> "FolderCount":
        """Returns the count at the time of these reports."""
        growth = [now - self.written.get(name, Amount()) for name, now in reports.items()]
        return FolderCount(sum(growth, self.held), {**self.written, **reports})


class FolderUsage:
    """Bounds the folder to `limit` bytes, for the process `writer`. Several threads call it."""

    def __init__(self, limit: int, writer: str) -> None:
        self.configured = self.limit = limit
        self._writer = writer
        self._lock = Lock()
        self._reserved = Amount()
        self.refused = 0
        self.written = Amount()
        """Amount that this process has written since it opened the folder, less what it has removed."""
        self.count: FolderCount | None = None
        """The last known count; None until some process has counted the folder: before that nothing fits into it."""

    @property
    def now(self) -> Amount:
        """Amount in the folder and on its way there, never less than nothing."""
        count = self.count
        if count is None:
            return Amount()
        held = count.held + self.written - count.written.get(self._writer, Amount()) + self._reserved
        return Amount(max(0, held.bytes), max(0, held.objects))

    @property
    def is_high(self) -> bool:
        return self.excess(self.now.bytes) > 0

    def excess(self, held: int) -> int:
        """Returns how many of `held` bytes have to go; none below the high water mark."""
        return held - self._mark(LOW) if held > self._mark(HIGH) else 0

    def _mark(self, share: float) -> int:
        now = self.now
        return min(int(share * self.limit), self.limit - now.bytes // max(1, now.objects))

    def reserve(self, size: int) -> bool:
        """Counts an object that is to be written. Returns False when it does not fit."""
        with self._lock:
            fits = self.count is not None and self.now.bytes + size <= self.limit
            if fits:
                self._reserved += Amount(size, 1)
            else:
                self.refused += 1
            return fits

    def settle(self, size: int, *, placed: bool) -> None:
        """Ends a reservation: the object is in the folder now, or was not written after all."""
        with self._lock:
            self._reserved -= Amount(size, 1)
            if placed:
                self.written += Amount(size, 1)

    def drop(self, size: int) -> None:
        """Counts an object that this process has removed."""
        with self._lock:
            self.written -= Amount(size, 1)

    def fit(self, free: int) -> None:
        """Bounds the folder to what it holds now and `free` bytes more, where that is less than it was configured for."""
        with self._lock:
            self.limit = self.configured if self.count is None else max(0, min(self.configured, self.now.bytes + free))


class UsageReports:
    """Reports of all processes: what each has written since it opened the folder."""

    def __init__(self, layout: FolderLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._clock = layout, clock
        self._published_at = clock()
        self.published = Amount()

    def publish(self, written: Amount) -> None:
        """Reports what this process has written, again before the report looks abandoned. Raises OSError."""
        if written != self.published or self._clock() - self._published_at > ABANDONED / 2:
            self._layout.publish(self._layout.writers / self._layout.writer, msgspec.json.encode(written))
            self.published, self._published_at = written, self._clock()

    def read(self) -> dict[str, Amount]:
        """Returns all reports, by the names of their processes. Raises OSError."""
        found = {}
        for path in self._layout.writers.iterdir():
            with suppress(FileNotFoundError, msgspec.DecodeError):
                found[path.name] = _decode_report(path.read_bytes())
        return found


class LeaseRecord(msgspec.Struct, frozen=True):
    """Content of the lease's file. `beat` changes with each renewal; a lease without an owner has been released.

    `count` is None while the owner has not counted the folder.
    """

    owner: str
    beat: int
    count: FolderCount | None


class FolderLease:
    """The lease as one process sees it; called by one thread."""

    def __init__(self, layout: FolderLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._clock = layout, clock
        self._record: LeaseRecord | None = None
        self._changed_at = 0.0

    def look(self) -> FolderCount | None:
        """Reads the lease. Returns the count with it, unless it is this process's own. Raises OSError."""
        try:
            found = _decode_lease(self._layout.lease.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            found = None
        if found != self._record:
            self._record, self._changed_at = found, self._clock()
        return None if found is None or found.owner == self._layout.writer else found.count

    @property
    def is_free(self) -> bool:
        """True where this process may take or renew the lease, as far as it has looked."""
        held_by_another = self._record is not None and self._record.owner not in ("", self._layout.writer)
        return not held_by_another or self._clock() - self._changed_at > DURATION

    def publish(self, count: FolderCount | None, *, released: bool = False) -> None:
        """Takes or renews the lease, or releases it, and publishes the count with it. Raises OSError."""
        beat = self._record.beat + 1 if self._record else 0
        record = LeaseRecord("" if released else self._layout.writer, beat, count)
        self._layout.publish(self._layout.lease, msgspec.json.encode(record))
        self._record, self._changed_at = record, self._clock()


_decode_report = msgspec.json.Decoder(Amount).decode
_decode_lease = msgspec.json.Decoder(LeaseRecord).decode
