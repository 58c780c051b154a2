"""The canary that the operator told of: where each request goes, and what came of those that went to either revision."""

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starling_agent.contract.router_report import FIRST_TOKEN_SECONDS, CanaryNotice, CanaryReport, RevisionCounts

from starling_router.backend import Backend
from starling_router.revision_order import ANY_REVISION, PLACES, NextPlaces, RevisionOrder, order_at, sticky_place
from starling_router.stream_errors import StreamErrors

_STABLE = PLACES
"""A place that no weight is above."""
ERRORS_AT_ONCE = 2
"""Errors of a canary that are news at once. Those after them come with the other counts: not each request is to be a report."""


@dataclass(slots=True)
class RevisionTally:
    """Counts of one revision while they grow. `first_tokens` has one count for each bucket, and one for all above the last."""

    placed: int = 0
    requests: int = 0
    errors: int = 0
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_SECONDS) + 1))
    seconds: float = 0.0

    def first_token(self, seconds: float) -> None:
        self.first_tokens[bisect_left(FIRST_TOKEN_SECONDS, seconds)] += 1
        self.seconds += seconds

    def counts(self) -> RevisionCounts:
        *within, everything = accumulate(self.first_tokens)
        return RevisionCounts(
            placed=self.placed,
            requests=self.requests,
            errors=self.errors,
            first_tokens=within,
            first_tokens_all=everything,
        )


class CanaryRun:
    """Counts of one try of a canary. `news` is called with each count: with True for what the operator is to know at once."""

    def __init__(self, notice: CanaryNotice, news: Callable[[bool], None]) -> None:
        self.canary, self.attempt = notice.canary, notice.attempt
        self.tallies = {notice.stable: RevisionTally(), notice.canary: RevisionTally()}
        self._news = news
        self._compared = self._differing = 0
        self._difference = ""

    def placed(self, revision: str) -> None:
        """Counts a request that is for a revision, whichever one answers it."""
        if (tally := self.tallies.get(revision)) is not None:
            tally.placed += 1
            self._news(False)

    def request(self, revision: str, *, failed: bool = False) -> None:
        """Counts a request of a revision. Those of a third one, which is on its way out, are no matter of the canary."""
        if (tally := self.tallies.get(revision)) is not None:
            tally.requests += 1
            self._count(tally, revision, failed)

    def failed(self, revision: str) -> None:
        """Counts a request that was counted before as an error."""
        if (tally := self.tallies.get(revision)) is not None:
            self._count(tally, revision, True)

    def first_token(self, revision: str, seconds: float) -> None:
        if (tally := self.tallies.get(revision)) is not None:
            tally.first_token(seconds)
            self._news(False)

    def compared(self, difference: str) -> None:
        """Counts a shadow whose tokens were compared, and how they differ; empty: they do not."""
        self._compared += 1
        if difference:
            self._differing += 1
            self._difference = self._difference or difference
        self._news(bool(difference) and self._differing == 1)

    def _count(self, tally: RevisionTally, revision: str, failed: bool) -> None:
        tally.errors += failed
        self._news(failed and revision == self.canary and tally.errors <= ERRORS_AT_ONCE)

    def report(self) -> CanaryReport:
        stable, tried = (tally.counts() for tally in self.tallies.values())
        return CanaryReport(
            canary=self.canary,
            attempt=self.attempt,
            stable=stable,
            tried=tried,
            compared=self._compared,
            differing=self._differing,
            difference=self._difference,
        )


class PlacedRequest:
    """A request on its way: the revisions that may serve it, and the one that does. Without a `run` it is counted nowhere."""

    def __init__(
        self,
        order: Callable[[], RevisionOrder] = lambda: ANY_REVISION,
        run: CanaryRun | None = None,
        *,
        placed_for: str | None = None,
        mixes: Callable[[], bool] = lambda: True,
    ) -> None:
        """`order` returns that of now: who waits while the weight changes goes by the new one.

        `placed_for` is the revision that the weight gives it to; None: something else chooses, as a stored response.

        `mixes` says whether either revision may go on now with an answer which the other one has begun.
        """
        self._order, self._run, self._placed_for = order, run, placed_for
        self._mixes, self._mixed = mixes, mixes()
        self._began: str | None = None
        """The revision that began the answer."""
        self._server: Backend | None = None
        """The one that gives it now."""
        self._errors: StreamErrors | None = None
        self._failed = False
        """True when what the last one gave has been counted as an error."""
        self._sent_at: float | None = None
        self.has_answer = False
        """True once a backend has answered with 200."""

    @property
    def order(self) -> RevisionOrder:
        """The revisions that may serve it; once one has begun, that one before all others."""
        order = self._order()
        return order if self._began is None or not order.revisions else RevisionOrder((self._began,))

    def sent(self) -> None:
        """Notes that it goes to a backend. The time to a first token counts from here: to wait before is no revision's fault."""
        self._sent_at = time.perf_counter() if self._began is None else None
        if self._run is not None and self._placed_for is not None:
            self._run.placed(self._placed_for)
        self._placed_for = None

    def lost(self, backend: Backend) -> None:
        """Notes that a backend had it, and went away before its answer or within it.

        Another one's answer makes that no less an error. But a server that has said that it ends hands its streams over.
        """
        if self._run is None or (self._began is not None and backend.ends):
            return
        if self._began is None:
            self._run.request(backend.revision, failed=True)
        else:
            self._fail(backend)

    def begin(self, backend: Backend, status: int, *, streams: bool, ends: bool = False) -> None:
        """Notes whose answer it is, or who goes on with it. With `ends` the answer is that it ends or sleeps, which is no error."""
        self._server, self._failed = backend, False
        if self._began is not None:
            return
        self._began, self.has_answer = backend.revision, status == 200
        if not streams or status >= 400:
            self._sent_at = None  # the first piece of a whole answer is its end
        if self._run is not None:
            self._run.request(backend.revision, failed=status >= 500 and not ends)
            self._errors = StreamErrors() if streams and status == 200 else None

    def piece(self, piece: bytes) -> None:
        """Notes a piece of the answer."""
        server = self._server
        if server is not None and self._errors is not None and self._errors.take(piece) and not server.ends:
            self._fail(server)
        if self._sent_at is not None:
            seconds, self._sent_at = time.perf_counter() - self._sent_at, None
            if self._run is not None and server is not None:
                self._run.first_token(server.revision, seconds)

    def broken(self) -> None:
        """Notes that the answer was cut, and that nobody goes on with it."""
        if self._server is not None:
            self._fail(self._server)

    def _fail(self, backend: Backend) -> None:
        """Counts what a backend gave of an answer as an error, once."""
        if self._run is None or self._failed:
            return
        self._failed = True
        if backend.revision == self._began:
            self._run.failed(backend.revision)
        else:  # it went on with what it has not been counted for
            self._run.request(backend.revision, failed=True)

    def may_resume(self, backend: Backend) -> bool:
        """Says whether a backend may go on with the answer: the tokens have to be those that would have come."""
        return backend.revision == self._began or (self._mixed and self._mixes())


class CanaryTraffic(Collector):
    """The canary that runs, if any. The last notice counts until another one comes: its share must outlive an operator.

    `on_news` is called when the report has changed: with True when the operator is to have it at once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.notice: CanaryNotice | None = None
        self.on_news: Callable[[bool], None] = lambda _: None
        self._places = NextPlaces(random.shuffle)
        self.run: CanaryRun | None = None
        registry.register(self)

    def take(self, notice: CanaryNotice | None) -> None:
        """Takes what the operator says. Counts begin anew with another pair of revisions, and with another try of the same."""
        before, self.notice = self.notice, notice
        if _try(before) == _try(notice):
            return
        self.run = None if notice is None else CanaryRun(notice, lambda at_once: self.on_news(at_once))
        self.on_news(True)

    def place(self, key: bytes | None, session: str | None, *, is_free: bool = True) -> PlacedRequest:
        """Places a request for a model's work, by what keeps its client with one revision where it has that.

        One that is not free has to go where something else says, and does not count as placed.
        """
        place = self._place(key, session)
        placed_for = self._order(place).revisions[0] if is_free and self.notice is not None else None
        return PlacedRequest(lambda: self._order(place), self.run, placed_for=placed_for, mixes=self._mixes)

    def _place(self, key: bytes | None, session: str | None) -> int:
        """Returns a request's place. One from before a canary stays at the stable revision."""
        notice = self.notice
        if notice is None:
            return _STABLE
        client = {"key": key, "session": None if session is None else session.encode(), "none": None}[notice.sticky_by]
        return self._places.take() if client is None else sticky_place(notice.canary, client)

    def _order(self, place: int) -> RevisionOrder:
        return ANY_REVISION if self.notice is None else order_at(self.notice, place)

    def _mixes(self) -> bool:
        return self.notice is None or self.notice.compare == "tokens"

    def place_question(self) -> PlacedRequest:
        """Places a request that asks for no work, as for a list of models: the stable revision answers, and nothing is counted."""
        return PlacedRequest(lambda: self._order(_STABLE))

    def weight_of(self, revision: str) -> int | None:
        """Returns the percentage of requests that a revision gets; None: it is not one of a canary's two."""
        notice = self.notice
        weights = {} if notice is None else {notice.stable: PLACES - notice.weight, notice.canary: notice.weight}
        return weights.get(revision)

    def report(self) -> CanaryReport | None:
        return None if self.run is None else self.run.report()

    def collect(self) -> Iterable[CounterMetricFamily | HistogramMetricFamily]:
        """Gives the series of both revisions of the canary that runs: none are left of those before it."""
        tallies = {} if self.run is None else self.run.tallies
        requests = CounterMetricFamily(
            "starling:router_revision_requests", "Requests of each revision while a canary runs.", labels=["revision"]
        )
        errors = CounterMetricFamily(
            "starling:router_revision_errors", "Those with a status of 5xx, or without an end.", labels=["revision"]
        )
        first_tokens = HistogramMetricFamily(
            "starling:router_revision_first_token_seconds", "Seconds to the first piece of a stream.", labels=["revision"]
        )
        for revision, tally in tallies.items():
            requests.add_metric([revision], tally.requests)
            errors.add_metric([revision], tally.errors)
            bounds = [*map(str, FIRST_TOKEN_SECONDS), "+Inf"]
            first_tokens.add_metric([revision], [*zip(bounds, accumulate(tally.first_tokens), strict=True)], tally.seconds)
        return requests, errors, first_tokens


def _try(notice: CanaryNotice | None) -> tuple[str, str, str] | None:
    return None if notice is None else (notice.stable, notice.canary, notice.attempt)
