"""Says which request waits, which goes on next, and how many may try when something happens at a backend.

Backends say twice a second how many requests they would run at once (`on_room`), and in between nobody knows. One that becomes
ready gets a few, and each that it takes lets two others try, until it refuses one: all that wait are there soon, and a full backend
has refused few. Then each request that ends there lets one other try, and so does the refusal of a long prompt, if it is short.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from starling_router.backend import Backend
from starling_router.fair_share import FairOrder, FairShare

FIRST_TRIES = 8
"""Requests that may try a backend at once that has become ready."""

Bound = Literal["requests", "bytes", "seconds"]


@dataclass(frozen=True, slots=True)
class HoldPolicy:
    """Bounds of what is held, together and of one request, and when a held stream tells its client that it waits.

    requests              0: none is held; tenants have equal parts of them
    bytes                 of their bodies, of which they have equal parts, too
    seconds               that a request is held at most
    steps                 of prompts that a backend may have waiting, in steps of its engine; None: as many as it takes
    first_comment_seconds until a stream begins with a comment
    comment_seconds       between later ones
    """

    requests: int = 1000
    bytes: int = 256 << 20
    seconds: float = 60.0
    steps: float | None = None
    first_comment_seconds: float = 5.0
    comment_seconds: float = 15.0

    def exceeded(self, requests: int, size: int, tenants: int = 1) -> Bound | None:
        """Returns the bound that so many requests with so many bytes of one of the tenants exceed."""
        if requests > max(1, self.requests // tenants):
            return "requests"
        return "bytes" if size > self.bytes // tenants else None


NEVER_HOLD = HoldPolicy(requests=0)


class Waiting(Protocol):
    """A request that waits. Numbers are given in order of arrival; `size` is of its body in bytes."""

    @property
    def number(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def share(self) -> FairShare: ...

    def may_use(self, backend: Backend) -> bool:
        """Says whether the request is for this backend, as it is for every one but where another has what it is about."""


W = TypeVar("W", bound=Waiting)


class HoldQueue(Generic[W]):
    """Gives the requests that wait: those of a share in order of arrival, shares by what they were served. One that is put again
    gets its old place.
    """

    def __init__(self) -> None:
        self._waiting: dict[FairShare, list[W]] = {}
        self._sizes: dict[FairShare, int] = {}
        self._order = FairOrder()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def held(self, share: FairShare | None) -> tuple[int, int]:
        """Returns how many requests of a share wait, and the bytes of their bodies; None: of all."""
        if share is None:
            return len(self), sum(self._sizes.values())
        return len(self._waiting.get(share, ())), self._sizes.get(share, 0)

    def passes(self, share: FairShare) -> None:
        """Notes a request that goes on without waiting."""
        self._came(share)
        self._order.went(share)

    def put(self, request: W) -> None:
        share = request.share
        self._came(share)
        insort(self._waiting.setdefault(share, []), request, key=_number)
        self._sizes[share] = self._sizes.get(share, 0) + request.size

    def next(self, may_go: Callable[[W], bool] = lambda _: True) -> W | None:
        """Takes out the request that goes on next, of those that may; None: there is none."""
        for share in self._order.of(self._waiting):
            request = next(filter(may_go, self._waiting[share]), None)
            if request is not None:
                self.forget(request)
                self._order.went(share)
                return request
        return None

    def has(self, backend: Backend) -> bool:
        return any(request.may_use(backend) for waiting in self._waiting.values() for request in waiting)

    def forget(self, request: W) -> None:
        """Takes out a request whose turn has not come. Does nothing where it has."""
        waiting = self._waiting.get(request.share, [])
        place = bisect_left(waiting, request.number, key=_number)
        if place < len(waiting) and waiting[place] is request:
            del waiting[place]
            self._sizes[request.share] -= request.size
            if not waiting:
                del self._waiting[request.share], self._sizes[request.share]

    def _came(self, share: FairShare) -> None:
        if share not in self._waiting:
            self._order.came(share, self._waiting)


def _number(request: Waiting) -> int:
    return request.number


def has_room(backend: Backend, steps: float | None) -> bool:
    """Says whether a backend takes a request that waits for its turn only here, and not there.

    It may have `steps` of prompts that wait, and as many requests as run at once; steps None: it takes what it does not refuse.
    """
    if steps is None:
        return True
    waits = backend.step and backend.pending and backend.pending >= steps * backend.step
    return not waits and (backend.limit is None or backend.open + backend.others < backend.limit)


def may_try(backend: Backend, tokens: int, *, waited: bool) -> bool:
    """Says whether a prompt of so many tokens may be sent there, of a request that `waited` or of a new one."""
    if backend.full and tokens > backend.fits:
        return False
    return not waited or has_turns(backend)


def has_turns(backend: Backend) -> bool:
    """Says whether some request that waited may be sent there now."""
    return backend.tries > 0 or backend.is_idle


def on_ready(backend: Backend) -> None:
    """The backend became ready."""
    backend.full, backend.growing, backend.tries = False, True, FIRST_TRIES


def on_room(backend: Backend, room: int) -> None:
    """The backend said that it would run so many more requests at once."""
    if room > 0:
        backend.full, backend.tries = False, max(backend.tries, room)


def on_sent(backend: Backend) -> None:
    """A request that had waited goes there."""
    backend.tries = max(0, backend.tries - 1)


def on_taken(backend: Backend) -> None:
    """The backend took a request that had waited."""
    if backend.growing:
        backend.tries += 2


def on_refused(backend: Backend, tokens: int) -> None:
    """The backend refused a prompt of so many tokens, whether it is full or ends. One of half as many may fit."""
    backend.full, backend.growing = True, False
    backend.fits = tokens // 2
    backend.tries = 1 if backend.fits else 0


def on_ended(backend: Backend) -> None:
    """An open request of this router ended there."""
    backend.full = False
    backend.tries += 1


def on_due(backend: Backend) -> None:
    """Nothing ended there for a while; requests of others may have."""
    backend.full, backend.growing, backend.tries = False, True, max(1, backend.tries)


def seen(total: int, ready: int, full: int) -> str:
    """Says in words what there is of backends."""
    if not total:
        return "this router has no servers"
    counts = ((total - ready, "not ready"), (full, "full"), (ready - full, "busy with requests before it"))
    return f"of {total} servers " + ", ".join(f"{count} {'is' if count == 1 else 'are'} {what}" for count, what in counts if count)
