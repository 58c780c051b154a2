"""Says which revision of a service a request is for while a canary runs, and which other one may serve it.

A request has a place from 0 to 99, and the canary those places that are below its weight. As the weight grows, those stay there
that were there before. Where a place comes from a key or a session, it is another one for each canary: not always the same clients
are the first to meet what is new.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from starling_agent.contract.router_report import CanaryNotice

from starling_router.backend import Backend

PLACES = 100


@dataclass(frozen=True, slots=True)
class RevisionOrder:
    """The revisions that may serve a request, the one that it is for first. None stands for all others, which else come last.

    reach   a backend so many revisions behind the first may take the request although one of the first is ready
    """

    revisions: tuple[str | None, ...] = ()
    reach: int = 0

    def rank(self, backend: Backend) -> int:
        """Returns 0 for a backend of the revision that the request is for, and more for others."""
        revisions = self.revisions
        found = backend.revision if backend.revision in revisions else None
        return revisions.index(found) if found in revisions else len(revisions)

    def usable(self, ready: Callable[[], Iterable[Backend]]) -> Callable[[Backend], bool]:
        """Returns what says of a backend whether the request may go there now. It is for one look at all of them.

        Those that are `ready` are only asked for where it matters, once for each rank and until one is nearer.
        """

        @cache
        def is_nearest(rank: int) -> bool:
            return not any(self.rank(other) < rank for other in ready())

        return lambda backend: (rank := self.rank(backend)) <= self.reach or is_nearest(rank)


ANY_REVISION = RevisionOrder()


def order_at(notice: CanaryNotice, place: int) -> RevisionOrder:
    """Returns the order of a request with a place.

    The canary's requests go to any other revision as soon as the canary has no room. Others go to the canary only where no backend
    of another revision is ready: it may be wrong, and is to touch no more than its weight. A third revision, which is on its way
    out, and pods that say none are no canary, and serve as the stable one does.
    """
    if place < notice.weight:
        return RevisionOrder((notice.canary, notice.stable, None), reach=2)
    return RevisionOrder((notice.stable, None, notice.canary), reach=1)


def sticky_place(canary: str, client: bytes) -> int:
    """Returns the place of a client, which every router finds alike."""
    digest = hashlib.blake2b(client, digest_size=8, key=hashlib.sha256(canary.encode()).digest()).digest()
    return int.from_bytes(digest, "big") % PLACES


class NextPlaces:
    """Gives places to requests of no client: each hundred of them gets all places, in an order by chance.

    So a weight is met exactly, and no pattern of the requests decides which ones the canary gets. `shuffle` works in place.
    """

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self._shuffle = shuffle
        self._left: list[int] = []

    def take(self) -> int:
        if not self._left:
            self._left = [*range(PLACES)]
            self._shuffle(self._left)
        return self._left.pop()
