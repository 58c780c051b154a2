"""Pins of chunks that requests wait for: a promoted chunk stays in its slot until its request starts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from starling_engine.kv_offload.primary import Chunk, PrimaryIndex, write_back_slots


@dataclass(slots=True)
class PinnedChunks:
    """One request's share of the quota."""

    chunks: dict[Chunk, bool] = field(default_factory=dict)
    """Chunks that it wants, and whether each is pinned for it."""
    postponed: list[Chunk] | None = None
    """Chunks that it is to want when its turn comes; None for a request that was not postponed."""
    since: float | None = None
    """Time at which it was first passed over."""


class PinQuota:
    """Half of the slots at most are wanted by waiting requests, unless one alone wants more; the rest is for stores.

    A request for which there is no room is postponed: it looks up when its turn comes.
    """

    def __init__(self, primary: PrimaryIndex) -> None:
        self._primary = primary
        self._pins: dict[str, PinnedChunks] = {}
        self._wanted: Counter[Chunk] = Counter()
        """Requests that want each chunk."""
        self._full = False
        """True if the first postponed request found no room since anything ended. The others leave it what becomes free."""

    def has_room(self, request: str, chunks: list[Chunk]) -> bool:
        """Returns whether the request may want these chunks as well, without others losing theirs."""
        more = sum(1 for chunk in chunks if chunk not in self._wanted)
        if not more:
            return True
        pinned, slots = self._pins.get(request, PinnedChunks()).chunks, self._primary.num_slots
        enough = min(len(pinned) + more, slots - write_back_slots(slots))  # whoever wants more has what there is
        alone = len(self._wanted) == len(pinned)
        free = slots - self._primary.num_pinned + sum(pinned.values())
        return (alone or len(self._wanted) + more <= slots // 2) and enough <= free

    def pin(self, request: str, chunks: Iterable[Chunk]) -> None:
        """Notes that the request wants these chunks, and pins those that are there. Called again when others have come."""
        pinned = self._of(request).chunks
        for chunk in chunks:
            if chunk not in pinned:
                self._wanted[chunk] += 1
                pinned[chunk] = False
            if not pinned[chunk] and self._primary.has(chunk):
                self._primary.pin(chunk)
                pinned[chunk] = True

    def postpone(self, request: str, chunks: list[Chunk]) -> None:
        """Lets the request wait for room for these chunks, including those that are there: they are to stay until it starts."""
        self._of(request).postponed = chunks

    def is_postponed(self, request: str) -> bool:
        return request in self._pins and self._pins[request].postponed is not None

    def passed_over(self, request: str, now: float) -> float:
        """Seconds since the request was first passed over because there was no room."""
        pins = self._of(request)
        pins.since = now if pins.since is None else pins.since
        return now - pins.since

    def take_turn(self, request: str) -> bool:
        """Pins what a postponed request wants, if there is room."""
        chunks = self._pins[request].postponed
        assert chunks is not None, "only a postponed request has a turn"
        if chunks and (self._full or not self.has_room(request, chunks)):
            self._full = True
            return False
        self.pin(request, chunks)
        return True

    def end_postponed(self, request: str) -> None:
        """The request has looked up, or gives up waiting."""
        self._pins[request].postponed = None

    def retry(self) -> None:
        """Slots may have become free."""
        self._full = False

    def forget(self, request: str) -> None:
        """The request has started or ended."""
        self._full = False
        pins = self._pins.pop(request, PinnedChunks())
        for chunk, pinned in pins.chunks.items():
            self._wanted[chunk] -= 1
            if not self._wanted[chunk]:
                del self._wanted[chunk]
            if pinned:
                self._primary.unpin(chunk)

    def clear(self) -> None:
        """Ends all pins. Postponed requests still look up when their turn comes."""
        for request, pins in list(self._pins.items()):
            self.forget(request)
            if pins.postponed is not None:
                self._pins[request] = PinnedChunks(postponed=pins.postponed, since=pins.since)

    def _of(self, request: str) -> PinnedChunks:
        return self._pins.setdefault(request, PinnedChunks())

    @property
    def requests(self) -> set[str]:
        return set(self._pins)

    @property
    def num_pins(self) -> int:
        return sum(pinned for pins in self._pins.values() for pinned in pins.chunks.values())
