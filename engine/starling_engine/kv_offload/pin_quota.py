"""What is fetched for requests that have not been admitted: it stays in its slots till then, and others take turns."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from starling_engine.kv_offload.primary import Chunk, PrimaryIndex
from starling_engine.kv_offload.write_back import most_kept


@dataclass(slots=True)
class PinnedChunks:
    """Of one request."""

    chunks: dict[Chunk, bool] = field(default_factory=dict)
    """What it wants, and whether each of them is pinned for it."""
    asks: list[Chunk] | None = None
    """What it is to want when its turn comes; None for one that has not been put off."""
    since: float | None = None
    """When it was first passed over."""


class PinQuota:
    """By request. Together they have half of the slots at most, unless one alone wants more: the rest is for what is stored.

    A request for which there is no room is put off: it asks when its turn comes.
    """

    def __init__(self, host: PrimaryIndex) -> None:
        self._host = host
        self._claims: dict[str, PinnedChunks] = {}
        self._wanted: Counter[Chunk] = Counter()
        """By how many requests."""
        self._full = False
        """Whether the first that was put off found no room, and nothing has ended since: the others leave it what becomes free."""

    def has_room(self, request: str, chunks: list[Chunk]) -> bool:
        """Whether the request may claim these, besides what it has claimed already, without others losing theirs."""
        more = sum(1 for chunk in chunks if chunk not in self._wanted)
        if not more:
            return True
        own, slots = self._claims.get(request, PinnedChunks()).chunks, self._host.num_slots
        enough = min(len(own) + more, slots - most_kept(slots))  # whoever wants more has what there is
        alone = len(self._wanted) == len(own)
        return (alone or len(self._wanted) + more <= slots // 2) and enough <= slots - self._host.num_pinned + sum(own.values())

    def claim(self, request: str, chunks: Iterable[Chunk]) -> None:
        """Pins those of the chunks that are there; it is said again when others have come."""
        pinned = self._of(request).chunks
        for chunk in chunks:
            if chunk not in pinned:
                self._wanted[chunk] += 1
                pinned[chunk] = False
            if not pinned[chunk] and self._host.has(chunk):
                self._host.pin(chunk)
                pinned[chunk] = True

    def put_off(self, request: str, chunks: list[Chunk]) -> None:
        """It needs these, also those that are there: they are to stay till it starts, and so want room as well."""
        self._of(request).asks = chunks

    def is_put_off(self, request: str) -> bool:
        return request in self._claims and self._claims[request].asks is not None

    def passed_over(self, request: str, now: float) -> float:
        """Seconds since it was first passed over for want of room."""
        claim = self._of(request)
        claim.since = now if claim.since is None else claim.since
        return now - claim.since

    def take_turn(self, request: str) -> bool:
        """Claims what a request that was put off wants, if there is room."""
        chunks = self._claims[request].asks
        assert chunks is not None, "only who was put off has turns"
        if chunks and (self._full or not self.has_room(request, chunks)):
            self._full = True
            return False
        self.claim(request, chunks)
        return True

    def end_put_off(self, request: str) -> None:
        """It has asked, or does so no more."""
        self._claims[request].asks = None

    def look_again(self) -> None:
        """Slots may have become free."""
        self._full = False

    def forget(self, request: str) -> None:
        """It is admitted, or has ended."""
        self._full = False
        claim = self._claims.pop(request, PinnedChunks())
        for chunk, pinned in claim.chunks.items():
            self._wanted[chunk] -= 1
            if not self._wanted[chunk]:
                del self._wanted[chunk]
            if pinned:
                self._host.unpin(chunk)

    def clear(self) -> None:
        """Nothing is kept for anybody any more; who was put off still asks when its turn comes."""
        for request, claim in list(self._claims.items()):
            self.forget(request)
            if claim.asks is not None:
                self._claims[request] = PinnedChunks(asks=claim.asks, since=claim.since)

    def _of(self, request: str) -> PinnedChunks:
        return self._claims.setdefault(request, PinnedChunks())

    @property
    def requests(self) -> set[str]:
        return set(self._claims)

    @property
    def num_pins(self) -> int:
        return sum(pinned for claim in self._claims.values() for pinned in claim.chunks.values())
