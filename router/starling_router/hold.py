"""Holds requests that no backend takes now, until one has room.

Those that wait sleep until something happens: a backend becomes ready or has room, a prompt is computed, a request ends.
It may also be time to ask a full backend again. Then the one whose turn it is tries, and after it the next one.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import msgspec
from starling_agent.http.errors import ApiError, ShuttingDown, as_api_error
from starling_agent.server.signals import SHUTDOWN_MESSAGE

from starling_router import hold_queue
from starling_router.accounts import Account
from starling_router.backend import Backend, Backends
from starling_router.canary import CanaryTraffic, PlacedRequest
from starling_router.demand import Demand
from starling_router.exchange import Exchange
from starling_router.fair_share import FairShare
from starling_router.gateway_headers import DroppedReason, dropped
from starling_router.hold_queue import Bound, HoldPolicy, HoldQueue
from starling_router.metrics import RouterMetrics
from starling_router.service_state import ServiceState
from starling_router.upstream import BackendAnswer, BackendUnreachable

TAKEN_SECONDS = 0.05
"""A backend that has not refused a request in this time has taken it: refusals are quick, and answers may take long."""
MOST_RETRY_SECONDS = 1.0
"""A full backend is asked again after this time at the latest."""
PASSED_SECONDS = 5.0
"""A request that was refused is passed by shorter ones for so long at most."""
ELSEWHERE = (429, 503)
"""Statuses of a backend that is full, sleeps or ends: another one may have room."""
ENDS = ("shutting_down", "engine_asleep")
"""Codes of a 503 that is no fault of the backend."""
GOING = (*ENDS, "engine_dead")
"""Codes of a 503 that is no matter of the request."""
_RETRY_AFTER = {"Retry-After": "5"}


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


@dataclass(frozen=True, slots=True)
class BackendRefusal:
    """An answer that another backend may better."""

    backend: Backend
    answer: BackendAnswer
    body: bytes

    @property
    def may_pass(self) -> bool:
        """True if the backend is full or ends. What is refused for another reason would be again."""
        if self.answer.status == 429:
            return self._code == "queue_full"
        return self.answer.status == 503 and (self._code is None or self._code in GOING)

    @property
    def ends(self) -> bool:
        """True if the backend says that it ends or sleeps, which is no error of its revision."""
        return self.answer.status == 503 and self._code in ENDS

    @property
    def _code(self) -> str | None:
        """The error's code; None: the body is no error of an agent's."""
        try:
            return msgspec.json.decode(self.body, type=_ErrorBody).error.code or ""
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    @property
    def retry_seconds(self) -> float:
        value = next((value for name, value in self.answer.headers if name == b"retry-after"), b"")
        try:
            return min(MOST_RETRY_SECONDS, max(0.0, float(value)))
        except ValueError:  # a date, or none
            return MOST_RETRY_SECONDS


class Hold:
    """All requests that wait. Belongs to the event loop that it is made in."""

    def __init__(
        self,
        policy: HoldPolicy,
        backends: Backends,
        metrics: RouterMetrics,
        state: ServiceState,
        canary: CanaryTraffic,
        tenants: int = 1,
    ) -> None:
        self.policy, self.metrics, self.tenants = policy, metrics, tenants
        self.queue: HoldQueue[HeldRequest] = HoldQueue()
        self.demand = Demand(lambda: len(self.queue), canary)
        self.ends = False
        self._state = state
        self._backends, self._numbers = backends, itertools.count()
        self._due: dict[Backend, asyncio.TimerHandle] = {}
        self._turn: HeldRequest | None = None
        """The request that was woken last, until it is on its way."""
        metrics.held.set_function(lambda: len(self.queue))

    @contextmanager
    def request(self, exchange: Exchange, kind: "HeldKind") -> Iterator["HeldRequest"]:
        """Gives a request its number."""
        held = HeldRequest(self, exchange, next(self._numbers), kind)
        with self.demand.request() if kind.works else nullcontext():
            try:
                yield held
            finally:
                held.leave()

    def end(self) -> None:
        """Refuses all requests that wait; no other one waits from now on."""
        self.ends = True
        self.demand.end()
        for timer in self._due.values():
            timer.cancel()
        while (request := self.queue.next()) is not None:
            request.woken.set()

    def next_turn(self) -> None:
        """Wakes the request whose turn it is, if a backend may have room for it."""
        if self._turn is not None or not len(self.queue):
            return
        ready, steps = self._backends.ready, self.policy.steps
        some = [backend for backend in ready if hold_queue.has_turns(backend) and hold_queue.has_room(backend, steps)]
        if not some:  # the usual case, twice a second for each backend: no request has to be looked at
            return
        self._turn = self.queue.next(lambda request: any(True for _ in request.choices(some)))
        if self._turn is not None:
            self._turn.woken.set()

    def turn_ends(self, request: "HeldRequest") -> None:
        """Notes that a request is on its way, or waits again: the next one's turn comes when it has been counted where it goes."""
        if self._turn is request:
            self._turn = None
            asyncio.get_running_loop().call_soon(self.next_turn)

    def is_awaited(self, request: "HeldRequest") -> bool:
        """Says whether others wait for one of the ready backends that the request may try."""
        return self._turn is not None or (len(self.queue) > 0 and any(map(self.queue.has, request.choices(self._backends.ready))))

    def ready_backends(self) -> Iterator[Backend]:
        return (backend for backend in self._backends.all if backend.ready)

    def is_ready(self, name: str) -> bool:
        return any(backend.pod == name for backend in self._backends.ready)

    def ready(self, backend: Backend) -> None:
        hold_queue.on_ready(backend)
        self.next_turn()

    def room(self, backend: Backend, room: int) -> None:
        hold_queue.on_room(backend, room)
        self.next_turn()

    def taken(self, backend: Backend) -> None:
        hold_queue.on_taken(backend)
        self.next_turn()
        if len(self.queue):
            self._ask_later(backend, MOST_RETRY_SECONDS)

    def refused(self, backend: Backend, retry_seconds: float, tokens: int) -> None:
        """Notes that a backend is full for a prompt of so many tokens."""
        hold_queue.on_refused(backend, tokens)
        if (due := self._due.pop(backend, None)) is not None:
            due.cancel()
        self._ask_later(backend, retry_seconds)

    def ended(self, backend: Backend) -> None:
        hold_queue.on_ended(backend)
        self.next_turn()

    def put(self, request: "HeldRequest") -> None:
        """Lets a request wait, and sees to it that ready backends are asked again whatever happens there."""
        self.queue.put(request)
        for backend in self._backends.ready:
            self._ask_later(backend, MOST_RETRY_SECONDS)
        self.next_turn()

    def _ask_later(self, backend: Backend, seconds: float) -> None:
        if backend not in self._due and not self.ends:
            self._due[backend] = asyncio.get_running_loop().call_later(seconds, self._ask, backend)

    def _ask(self, backend: Backend) -> None:
        del self._due[backend]
        if backend not in self._backends.all:  # it has gone
            return
        hold_queue.on_due(backend)
        self.next_turn()
        if len(self.queue):
            self._ask_later(backend, MOST_RETRY_SECONDS)

    def no_room(self, bound: Bound, account: Account) -> ApiError:
        """Returns the error of a request that is held no longer, or not at all, with what was seen."""
        self.metrics.hold_refused.labels(bound).inc()
        if account.counters is not None:
            account.counters.refused(bound).inc()
        reason: DroppedReason = "rejected-ttl-expired" if bound == "seconds" else "rejected-saturated"
        ready = self._backends.ready
        there = hold_queue.seen(len(self._backends.all), len(ready), sum(backend.full for backend in ready))
        if bound == "seconds":
            why = f"no server took this request in {self.policy.seconds:.3g} s: {there}"
        else:
            limit = {"requests": f"{self.policy.requests} requests", "bytes": f"{self.policy.bytes} bytes of requests"}[bound]
            of = "" if self.tenants == 1 else f" of {self.tenants} tenants, each with an equal part,"
            why = f"{there}, and no more than {limit}{of} may wait here (--hold-{bound})"
            if ready:
                headers = _RETRY_AFTER | dropped(reason)
                return ApiError(429, f"{why}; try again soon", kind="rate_limit_error", code="queue_full", headers=headers)
        self.metrics.refused.inc()
        error = self._state.no_backend(why)
        error.headers |= dropped(reason)
        return error


@dataclass(frozen=True, slots=True)
class HeldKind:
    """Says what matters of a request while it waits.

    works     it is for a model's work, so that the service is in use
    size      of its body, in bytes; 0: it never waits
    streams   its answer may begin before a backend has it
    pod       the one that has what the request is about
    tokens    of its prompt
    account   of the one for whom it is counted
    share     with which it takes its turns
    placed    which revisions may serve it
    leads     says whether it goes before others now
    """

    works: bool
    size: int
    streams: bool
    pod: str | None
    tokens: int
    account: Account
    share: FairShare
    placed: PlacedRequest
    leads: Callable[[], bool] = lambda: False


class HeldRequest:
    """A request on its way, which may wait several times. Its time is counted from the first of them.

    `woken` is set when its turn comes, and until a backend took it.
    """

    def __init__(self, hold: Hold, exchange: Exchange, number: int, kind: HeldKind) -> None:
        self.number, self.size, self.share = number, kind.size, kind.share
        self.woken = asyncio.Event()
        self._hold, self._exchange, self._kind = hold, exchange, kind
        self._began: float | None = None
        self._comment_at = 0.0
        self._refused, self._may_pass = False, False
        self._observed = False

    @property
    def is_behind(self) -> bool:
        """True for a new request while others wait for one of the backends that it could have, unless it leads there."""
        if not self._waits or self._began is not None or any(map(self._leads, self._hold.ready_backends())):
            return False
        return self._hold.is_awaited(self)

    def may_use(self, backend: Backend) -> bool:
        return self._usable()(backend)

    def choices(self, among: Iterable[Backend]) -> Iterator[Backend]:
        """Yields those that the request may be sent to now; one that never waits may be sent to full backends, too."""
        usable, waited = filter(self._usable(), among), self._began is not None
        if not self._waits:
            yield from usable
            return
        for backend in usable:
            has_room = self._leads(backend) or hold_queue.has_room(backend, self._hold.policy.steps)
            if has_room and hold_queue.may_try(backend, self._kind.tokens, waited=waited):
                yield backend

    def _leads(self, backend: Backend) -> bool:
        """Says whether the request goes to a backend before those that wait, and its prompt before others there.

        That is a tenant's only request. A backend has one such prompt at a time, so that the others have their turns, too.
        """
        return not backend.leading and self._kind.leads()

    def _usable(self) -> Callable[[Backend], bool]:
        pod, order = self._kind.pod, self._kind.placed.order
        if pod is not None and self._hold.is_ready(pod):
            return lambda backend: pod == backend.pod
        return order.usable(self._hold.ready_backends) if self._may_wait else lambda _: True

    @property
    def _waits(self) -> bool:
        return self.size > 0 and self._hold.policy.requests > 0 and not self._hold.ends

    @property
    def _may_wait(self) -> bool:
        """False for one that never waits, or would be refused again: it may be sent to any revision, and gets the last refusal."""
        return self._waits and (self._may_pass or not self._refused)

    async def attempt(self, backend: Backend, answering: Awaitable[BackendRefusal | None]) -> BackendRefusal | None:
        """Waits for what a backend makes of this request: returns and raises what `answering` does."""
        settled = self._leaves(backend)
        has_ended = True
        try:
            refusal = await answering
            has_ended = refusal is None or not refusal.may_pass
        except BackendUnreachable:
            has_ended = False
            raise
        finally:
            if settled is not None:
                settled.cancel()
            if has_ended and self.size:  # others take no room
                self._hold.ended(backend)
        if refusal is None:
            self._taken(backend)
        else:
            self._note(backend, refusal)
        return refusal

    def _leaves(self, backend: Backend) -> asyncio.TimerHandle | None:
        """Notes that the request goes to a backend. Returns the timer of one that had waited, after which it was taken there."""
        if not self.woken.is_set():
            if self._began is None:
                self._hold.queue.passes(self.share)
            return None
        hold_queue.on_sent(backend)
        self._hold.turn_ends(self)
        return asyncio.get_running_loop().call_later(TAKEN_SECONDS, self._taken, backend)

    def _note(self, backend: Backend, refusal: BackendRefusal) -> None:
        self._refused = True
        if refusal.may_pass:
            self._may_pass = True
            now = asyncio.get_running_loop().time()
            may_pass = self._began is None or now < self._began + PASSED_SECONDS
            self._hold.refused(backend, refusal.retry_seconds, self._kind.tokens if may_pass else 0)

    def _taken(self, backend: Backend) -> None:
        if self.woken.is_set():
            self.woken.clear()
            self._observe()
            self._hold.taken(backend)

    async def wait(self) -> bool:
        """Waits for its turn. Returns False for one that does not wait: what was seen of backends is its answer.

        Raises ApiError when a bound is reached, and when the router ends.
        """
        if not self._may_wait:
            return False
        self._refused = self._may_pass = False
        self.woken.clear()
        until = self._until()
        self._hold.turn_ends(self)
        self._hold.put(self)
        held = self._kind.account.counters
        try:
            if held is not None:
                held.held.inc()
            while not self.woken.is_set():
                await self._sleep(until)
        finally:
            self._hold.queue.forget(self)
            if held is not None:
                held.held.dec()
        if self._hold.ends:
            raise _ends()
        return True

    def _until(self) -> float:
        """Returns the end of its time. Raises ApiError for a new request that is one too many."""
        hold, now = self._hold, asyncio.get_running_loop().time()
        if self._began is None:
            requests, size = hold.queue.held(self.share if hold.tenants > 1 else None)
            bound = hold.policy.exceeded(requests + 1, size + self.size, hold.tenants)
            if bound is not None:
                raise hold.no_room(bound, self._kind.account)
            self._began, self._comment_at = now, now + hold.policy.first_comment_seconds
        return self._began + hold.policy.seconds

    async def _sleep(self, until: float) -> None:
        """Sleeps until its turn or until it is time for a comment. Raises ApiError at the end of its time."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(until, self._comment_at) if self._kind.streams else until):
                await self.woken.wait()
                return
        if loop.time() >= until:
            raise self._hold.no_room("seconds", self._kind.account)
        await self._exchange.say_waiting()
        self._comment_at = loop.time() + self._hold.policy.comment_seconds

    def _observe(self) -> None:
        if self._began is not None and not self._observed:
            self._observed = True
            self._hold.metrics.hold_seconds.observe(asyncio.get_running_loop().time() - self._began)

    def leave(self) -> None:
        self._observe()
        self._hold.turn_ends(self)


def _ends() -> ApiError:
    error = as_api_error(ShuttingDown(SHUTDOWN_MESSAGE))
    error.headers |= dropped("rejected-shutting-down")
    return error
