"""Amount of data in the folder, as one process knows it: the last count, and what it and others have written since."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import msgspec

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout

HIGH, LOW = 0.98, 0.95
"""Shares of the limit at which eviction begins and ends, or sooner where the largest object would find no room."""
ABANDONED = 3600.0
"""Age in seconds of a file that no living process can be writing."""


@dataclass(frozen=True)
class Amount:
    """Number of objects, and the bytes of their files."""

    bytes: int = 0
    objects: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.objects + other.objects)

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes - other.bytes, self.objects - other.objects)


class FolderUsage:
    """Bounds the folder to `limit` bytes. Several threads call it."""

    def __init__(self, limit: int) -> None:
        self._configured = self.limit = limit
        self._lock = Lock()
        self._counted = self._written_then = Amount()
        self.written = Amount()
        """Amount that this process has written since it opened the folder, less what it has dropped."""
        self._unplaced = Amount()
        """Part of `written` that may not be in the folder yet."""
        self._largest = 0
        self.is_known = False
        """True when a process has counted the folder: before that nothing fits into it."""

    @property
    def now(self) -> Amount:
        """Amount in the folder, never less than nothing."""
        held = self._counted + self.written - self._written_then
        return Amount(max(0, held.bytes), max(0, held.objects))

    @property
    def is_high(self) -> bool:
        return self.now.bytes > self.high_water

    @property
    def high_water(self) -> int:
        return min(int(HIGH * self.limit), self._room_for_next)

    @property
    def low_water(self) -> int:
        return min(int(LOW * self.limit), self._room_for_next)

    @property
    def _room_for_next(self) -> int:
        now = self.now
        size = max(self._largest, now.bytes // max(1, now.objects))  # of what others write, the mean is known at once
        return self.limit - size if 4 * size <= self.limit else self.limit  # a limit of fewer objects would be left too empty

    def note_size(self, size: int) -> None:
        """Notes that an object of that size is in the folder, or to come."""
        self._largest = max(self._largest, size)

    def reserve(self, size: int) -> bool:
        """Counts an object that is to be written. Returns False when it does not fit."""
        with self._lock:
            self.note_size(size)
            if not self.is_known or self.now.bytes + size > self.limit:
                return False
            self.written += Amount(size, 1)
            self._unplaced += Amount(size, 1)
            return True

    def settle(self, size: int, *, placed: bool) -> None:
        """Ends a reservation: the object is in the folder now, or was not written after all."""
        with self._lock:
            self._unplaced -= Amount(size, 1)
            if not placed:
                self.written -= Amount(size, 1)

    def drop(self, size: int) -> None:
        """Counts an object that this process has removed."""
        with self._lock:
            self.written -= Amount(size, 1)

    @property
    def placed(self) -> Amount:
        """Part of `written` that a sweep finds. What is placed during the sweep may be counted twice."""
        with self._lock:
            return self.written - self._unplaced

    def set_counted(self, held: Amount, written: Amount) -> None:
        """Notes that the folder held `held` when this process had written `written`."""
        with self._lock:
            self._counted, self._written_then = held, written
            self.is_known = True

    def add_counted(self, amount: Amount) -> None:
        """Counts what other processes have written."""
        with self._lock:
            self._counted += amount

    @property
    def is_shrunk(self) -> bool:
        return self.limit < self._configured

    def shrink(self) -> None:
        """Sets the limit a little above what there is now, which fills the disk, until `restore`."""
        self.limit = min(self.limit, int(self.now.bytes / HIGH))

    def restore(self) -> None:
        self.limit = self._configured


_decode = msgspec.json.Decoder(tuple[int, int]).decode


class UsageReports:
    """Reports of all processes that share the folder: what each has written since it opened it, in a file of its own."""

    def __init__(self, layout: FolderLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._clock = layout, clock
        self._path = layout.writers / layout.new_temporary().name
        self._published_at: float | None = None
        self.published = Amount()

    def publish(self, written: Amount) -> None:
        """Reports what this process has written. Raises OSError."""
        if written != self.published or self._is_missed():
            self._layout.publish(self._path, msgspec.json.encode((written.bytes, written.objects)))
            self.published, self._published_at = written, self._clock()

    def _is_missed(self) -> bool:
        """Returns whether the report is gone, or would soon be removed as abandoned: the next one would count all as new."""
        if self._published_at is None:
            return False
        return self._clock() - self._published_at > ABANDONED / 6 or not self._path.exists()

    def of_others(self) -> dict[str, Amount]:
        """Returns all other processes' reports. Raises OSError."""
        found = {}
        with os.scandir(self._layout.writers) as entries:
            for entry in entries:
                with suppress(FileNotFoundError, msgspec.DecodeError):
                    if entry.name != self._path.name:
                        found[entry.name] = Amount(*_decode(Path(entry.path).read_bytes()))
        return found


def growth(before: dict[str, Amount], after: dict[str, Amount]) -> Amount:
    """Returns what processes have written between two looks at their reports."""
    return sum((now - before.get(name, Amount()) for name, now in after.items()), Amount())
