"""The folder's background thread: takes its turn at the lease, tells what was written, and, where it holds the lease, evicts."""

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout
from starling_engine.kv_offload.secondary.folder.lease import FolderLease
from starling_engine.kv_offload.secondary.folder.outage import FULL, FolderBreakers
from starling_engine.kv_offload.secondary.folder.reports import UsageReports, tidy
from starling_engine.kv_offload.secondary.folder.sweep import sweep
from starling_engine.kv_offload.secondary.folder.usage import LOW, Amount, FolderUsage

TICK, SOON, CONFIRM = 5.0, 1.0, 0.3
"""Seconds between two looks: usually, when the limit is near or a walk is under way, and after the lease was taken."""

REST = 0.05
"""Seconds between two looks however often it is woken: each writes the lease."""

UNTOLD = 0.01
"""Of the limit: what a process writes, at most, before it looks what others have written."""

RESCAN = 600.0
"""Seconds after which all is counted again, for people and crashes change the folder too."""

SHRUNK = 120.0
"""Seconds after which a disk that was full is expected to have room again."""

STUCK = 60.0
"""Seconds until eviction is tried again after it could remove nothing: the files are another user's, or there are none."""

SLICE = 0.005
"""Seconds of work between two pauses of a walk; a pause is `COUNTING` or `EVICTING` times as long as the work."""
COUNTING, EVICTING = 9.0, 1.0

SPARE = 1 << 30
"""Bytes that stay free on the disk, or a hundredth of the limit where that is less."""


class _Interrupted(Exception):
    """The walk is not to go on."""


@dataclass(frozen=True)
class _Count:
    """`held` in the folder, when this process had written `written` and others what they had reported."""

    held: Amount
    written: Amount
    reports: dict[str, Amount]
    at: float = field(default_factory=time.monotonic)

    def plus(self, reports: dict[str, Amount]) -> Amount:
        """With what others have written since."""
        return sum((now - self.reports.get(name, Amount()) for name, now in reports.items()), self.held)


class FolderJanitor:
    """`tick` is all it does; `start` has a thread do it. Other threads call `wake` and `press`."""

    def __init__(self, layout: FolderLayout, usage: FolderUsage, health: FolderBreakers) -> None:
        self._layout, self._usage, self._health = layout, usage, health
        self._lease, self._reports = FolderLease(layout), UsageReports(layout)
        self._learnt: object = None
        self._count: _Count | None = None
        self._pressed = self._stuck = False
        self._renewed = self._worked = self._pressed_at = 0.0
        self._pause = COUNTING
        self._stop, self._wake = Event(), Event()
        self._thread = Thread(target=self._run, name="kv-folder", daemon=True)
        self.holds = False
        self.evicted = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Gives the lease back. Waits a moment for the thread, which may hang with the disk."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def wake(self) -> None:
        """Something was written, or could not be for lack of room: there may be something to evict, or to tell who evicts."""
        untold = self._usage.written.bytes - self._reports.told.bytes
        if (self.holds and self._usage.is_high) or untold > UNTOLD * self._usage.limit:
            self._wake.set()

    def press(self) -> None:
        """The disk is full."""
        self._pressed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.tick()
            except OSError as error:
                self._health.note(error)
            except _Interrupted:
                pass
            self._wake.wait(self._interval())
            self._stop.wait(REST)
            self._wake.clear()
        with suppress(OSError):
            self.leave()

    def _interval(self) -> float:
        if self._lease.is_new:
            return CONFIRM
        return SOON if self._usage.now.bytes > 0.9 * self._usage.limit else TICK

    def tick(self) -> None:
        """One look at the folder. Raises OSError."""
        self._layout.make()
        if not self._usage.is_known and self._layout.is_empty():
            self._usage.learn(Amount(), Amount())
        if self.holds:
            self._catch_up()  # first, for others are told of it with the lease
        if not self._take_turn():
            self._follow()
            return
        if self._count is None:
            self._begin()
        if self._is_due():
            self._sweep()
            tidy(self._layout)
        self._reports.tell(self._usage.written)

    def leave(self) -> None:
        """Gives the lease back, with the count. Raises OSError."""
        self._reports.tell(self._usage.written)
        self._lease.give_back(self._amount)

    @property
    def _amount(self) -> Amount | None:
        return self._usage.now if self._usage.is_known else None

    def _take_turn(self) -> bool:
        """Whether to evict: as the holder, or as who would be it, had the disk room for a lease. Raises OSError."""
        self._renewed = time.monotonic()
        try:
            self.holds = self._lease.hold(self._amount)
        except OSError as error:
            if error.errno not in FULL or not (self.holds or self._lease.is_new):
                raise
            self._pressed = True
            return True
        return self.holds

    def _follow(self) -> None:
        """The holder's count is ours, with what it cannot have heard of. Raises OSError."""
        told, term = self._reports.told, self._lease.heard
        self._count = None
        self._reports.tell(self._usage.written)
        if term is not None and term != self._learnt and term.amount is not None:
            self._learnt = term
            self._usage.learn(term.amount, told)

    def _begin(self) -> None:
        """Goes on from what the last holder knew, until all is counted. Raises OSError."""
        written = self._usage.written
        self._count = _Count(self._usage.now, written, self._reports.of_others(), at=-math.inf)

    def _catch_up(self) -> None:
        """Counts what others have written since. Raises OSError."""
        if self._count is not None and self._usage.is_known:
            self._usage.learn(self._count.plus(self._reports.of_others()), self._count.written)

    def _is_due(self) -> bool:
        assert self._count is not None, "whoever holds the lease has begun"
        age = time.monotonic() - self._count.at
        self._pressed |= self._is_disk_full()
        if self._pressed or self._usage.is_high:
            return age > STUCK or not self._stuck
        return age > (SHRUNK if self._usage.is_shrunk else RESCAN)

    def _is_disk_full(self) -> bool:
        disk = os.statvfs(self._layout.root)
        return disk.f_bavail * disk.f_frsize < min(SPARE, self._usage.limit // 100)

    def _sweep(self) -> None:
        """Counts, and evicts where there is too much. Raises OSError.

        What was written meanwhile is added: too much at worst, for the walk has found some of it, and never too little.
        """
        pressed, self._pressed = self._pressed, False
        usage, written, reports = self._usage, self._usage.placed, self._reports.of_others()
        goal = self._goal(pressed)
        self._pause, self._worked = EVICTING if goal else COUNTING, time.monotonic()
        goal = max(goal, usage.limit - usage.low_water)  # more may be found than is known, and is not walked for again
        swept = sweep(self._layout.objects, goal, lambda there: self._kept(there, pressed), self._breathe)
        self.evicted += swept.evicted
        usage.saw(swept.largest)
        excess = swept.held.bytes - self._kept(swept.held.bytes, pressed)
        self._stuck = excess > 0 and not swept.evicted  # what is still being written is none that could go
        since = self._reports.of_others()
        self._count = _Count(_Count(swept.held, written, reports).plus(since), written, since)
        usage.learn(self._count.held, written)
        if pressed:
            usage.shrink()
            self._pressed_at = time.monotonic()
        elif time.monotonic() - self._pressed_at > SHRUNK:
            usage.restore()

    def _goal(self, pressed: bool) -> int:
        """Bytes to evict, by what is known before all is counted."""
        there = self._usage.now.bytes
        return max(0, there - self._kept(there, pressed))

    def _kept(self, there: int, pressed: bool) -> int:
        """How many of so many bytes may stay."""
        kept = self._usage.low_water if there > self._usage.high_water else there
        return min(kept, int(LOW * there)) if pressed else kept

    def _breathe(self) -> None:
        """Lets others have the processor and the disk, and keeps the lease meanwhile. Raises _Interrupted, OSError."""
        worked = time.monotonic() - self._worked
        self._look()
        if worked > SLICE:
            self._rest(min(worked, 1.0) * self._pause)
            self._worked = time.monotonic()

    def _rest(self, seconds: float) -> None:
        """Raises _Interrupted, OSError."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._stop.wait(min(left, SOON))
            self._look()

    def _look(self) -> None:
        """The limit holds during a walk too, however long that takes. Raises _Interrupted, OSError."""
        if self._stop.is_set():
            raise _Interrupted
        if time.monotonic() - self._renewed > SOON:
            self._catch_up()
            if not self._take_turn():
                raise _Interrupted
            if self._usage.is_high:
                self._pause = EVICTING  # writers wait for the walk's end
