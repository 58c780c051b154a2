"""What is fetched for requests that have not been admitted: it stays in its slots till then, and others take turns."""

from collections import Counter
from collections.abc import Iterable

from starling_engine.tiers.host import Chunk, HostIndex


def most_kept(num_slots: int) -> int:
    """Of so many slots, those that may be pinned to be written outside, however long that takes."""
    return 1 + num_slots // 4


class Claims:
    """By request. Together they have half of the slots at most, unless one alone wants more: the rest is for what is stored.

    A request for which there is no room is put off: it asks when its turn comes.
    """

    def __init__(self, host: HostIndex) -> None:
        self._host = host
        self._claims: dict[str, dict[Chunk, bool]] = {}
        """Whether each chunk that a request wants is pinned for it."""
        self._wanted: Counter[Chunk] = Counter()
        """By how many of these."""
        self._put_off: dict[str, list[Chunk]] = {}
        """What each of those that are to ask again wants."""
        self._since: dict[str, float] = {}
        """When they were first passed over."""
        self._full = False
        """Whether the first of them has found no room, and nothing has ended since: the others leave it what becomes free."""

    def has_room(self, request: str, chunks: list[Chunk]) -> bool:
        """Whether the request may claim these without others losing theirs."""
        others = len(self._wanted) - len(self._claims.get(request, ()))
        more = sum(1 for chunk in chunks if chunk not in self._wanted)
        if not more:
            return True
        enough = min(more, self._host.num_slots - most_kept(self._host.num_slots))  # whoever wants more has what there is
        return (not others or others + more <= self._host.num_slots // 2) and enough <= self._host.num_slots - self._host.num_pinned

    def claim(self, request: str, chunks: Iterable[Chunk]) -> None:
        """Pins those of the chunks that are there; it is said again when others have come."""
        claims = self._claims.setdefault(request, {})
        for chunk in chunks:
            if chunk not in claims:
                self._wanted[chunk] += 1
                claims[chunk] = False
            if not claims[chunk] and self._host.has(chunk):
                self._host.pin(chunk)
                claims[chunk] = True

    def put_off(self, request: str, chunks: list[Chunk]) -> None:
        self._put_off[request] = chunks

    def is_put_off(self, request: str) -> bool:
        return request in self._put_off

    def passed_over(self, request: str, now: float) -> float:
        """Seconds since it was first passed over for want of room."""
        return now - self._since.setdefault(request, now)

    def take_turn(self, request: str) -> bool:
        """Claims what a request that was put off wants, if there is room."""
        chunks = self._put_off[request]
        if chunks and (self._full or not self.has_room(request, chunks)):
            self._full = True
            return False
        self.claim(request, chunks)
        return True

    def end_put_off(self, request: str) -> None:
        """It has asked, or does so no more."""
        self._put_off.pop(request, None)

    def look_again(self) -> None:
        """Slots may have become free."""
        self._full = False

    def forget(self, request: str) -> None:
        """It is admitted, or has ended."""
        self._put_off.pop(request, None)
        self._since.pop(request, None)
        self._full = False
        for chunk, pinned in self._claims.pop(request, {}).items():
            self._wanted[chunk] -= 1
            if not self._wanted[chunk]:
                del self._wanted[chunk]
            if pinned:
                self._host.unpin(chunk)

    def clear(self) -> None:
        """Nothing is kept for anybody any more."""
        for request in list(self._claims):
            self.forget(request)

    @property
    def requests(self) -> set[str]:
        return {*self._claims, *self._put_off, *self._since}

    @property
    def num_pins(self) -> int:
        return sum(pinned for claims in self._claims.values() for pinned in claims.values())
