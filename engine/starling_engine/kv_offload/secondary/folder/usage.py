"""How much the folder holds, as far as one process knows: the count that was last published and what it has written since."""

from dataclasses import dataclass
from threading import Lock

HIGH, LOW = 0.98, 0.95
"""Of the limit: eviction begins above the one and ends at the other, sooner where the largest object would find no room."""
FEW = 4
"""Objects of a size of which the limit allows fewer have no room kept for the next one: there would be nothing left."""


@dataclass(frozen=True)
class Amount:
    """Of objects, and of the bytes of their files."""

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
        self._known = self._then = Amount()
        self.written = Amount()
        """By this process since it opened the folder, less what it has dropped; it only says what has changed."""
        self._unplaced = Amount()
        """Of that, what may not be in the folder yet."""
        self._largest = 0
        self.is_known = False
        """Whether anybody has said what the folder holds: before that nothing fits into it."""

    @property
    def now(self) -> Amount:
        """In the folder, never less than nothing."""
        held = self._known + self.written - self._then
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
        return self.limit - size if size * FEW <= self.limit else self.limit

    def saw(self, size: int) -> None:
        """An object of that size is there, or to come."""
        self._largest = max(self._largest, size)

    def reserve(self, size: int) -> bool:
        """Counts an object that is to be written; False when it does not fit."""
        with self._lock:
            self.saw(size)
            if not self.is_known or self.now.bytes + size > self.limit:
                return False
            self.written += Amount(size, 1)
            self._unplaced += Amount(size, 1)
            return True

    def settle(self, size: int, *, placed: bool) -> None:
        """Of an object that was reserved: it is in the folder now, or was not written after all."""
        with self._lock:
            self._unplaced -= Amount(size, 1)
            if not placed:
                self.written -= Amount(size, 1)

    def drop(self, size: int) -> None:
        """Of an object that is in the folder no longer."""
        with self._lock:
            self.written -= Amount(size, 1)

    @property
    def placed(self) -> Amount:
        """Of what was written, what a walk through the folder finds. What is placed during the walk may be counted twice."""
        with self._lock:
            return self.written - self._unplaced

    def learn(self, held: Amount, then: Amount) -> None:
        """The folder held `held` when this process had written `then`."""
        with self._lock:
            self._known, self._then = held, then
            self.is_known = True

    @property
    def is_shrunk(self) -> bool:
        return self.limit < self._configured

    def shrink(self) -> None:
        """The disk holds no more than a little above what there is now: that is the limit until `restore`."""
        self.limit = min(self.limit, int(self.now.bytes / HIGH))

    def restore(self) -> None:
        self.limit = self._configured
