"""Pins of chunks that requests wait for: a promoted chunk stays in its slot until its request starts."""

from collections import Counter
from collections.abc import Iterable, Sequence

from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import Chunk


class PinQuota:
    """Half of the slots at most are wanted by waiting requests, unless one alone wants more; the rest is for stores."""

    def __init__(self, primary: PrimaryIndex) -> None:
        self._primary = primary
        self._pins: dict[str, dict[Chunk, bool]] = {}
        """Chunks that each request wants, and whether each is pinned for it."""
        self._wanted: Counter[Chunk] = Counter()
        """Requests that want each chunk."""
        self._full = False
        """True if the first request in line found no room since anything ended. The others leave it what becomes free."""

    def has_room(self, request: str, chunks: Iterable[Chunk]) -> bool:
        """Returns whether the request may want these chunks as well, without others losing theirs."""
        more = sum(1 for chunk in chunks if chunk not in self._wanted)
        if not more:
            return True
        pinned, primary = self._pins.get(request, {}), self._primary
        enough = min(len(pinned) + more, primary.num_slots - primary.write_back_slots)  # whoever wants more has what there is
        alone = len(self._wanted) == len(pinned)
        free = primary.num_slots - primary.num_pinned + sum(pinned.values())
        return (alone or len(self._wanted) + more <= primary.num_slots // 2) and enough <= free

    def pin(self, request: str, chunks: Iterable[Chunk]) -> None:
        """Notes that the request wants these chunks, and pins those that are there. Called again when others have come."""
        pinned = self._pins.setdefault(request, {})
        for chunk in chunks:
            if chunk not in pinned:
                self._wanted[chunk] += 1
                pinned[chunk] = False
            if not pinned[chunk] and self._primary.has(chunk):
                self._primary.pin(chunk)
                pinned[chunk] = True

    def pin_in_turn(self, request: str, chunks: Sequence[Chunk]) -> bool:
        """Pins these chunks if there is room, and no request before this one found none. Returns whether it did."""
        if chunks and (self._full or not self.has_room(request, chunks)):
            self._full = True
            return False
        self.pin(request, chunks)
        return True

    def retry(self) -> None:
        """Slots may have become free."""
        self._full = False

    def forget(self, request: str) -> None:
        """The request has started or ended."""
        self._full = False
        pins = self._pins.pop(request, {})
        self._primary.unpin(chunk for chunk, pinned in pins.items() if pinned)
        for chunk in pins:
            self._wanted[chunk] -= 1
            if not self._wanted[chunk]:
                del self._wanted[chunk]

    def clear(self) -> None:
        """Ends all pins."""
        for request in list(self._pins):
            self.forget(request)

    @property
    def requests(self) -> set[str]:
        return set(self._pins)

    @property
    def num_pins(self) -> int:
        return sum(pinned for pins in self._pins.values() for pinned in pins.values())
