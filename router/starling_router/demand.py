"""Counts what clients ask for: the operator goes to zero groups while that is nothing, and wakes the service when they ask."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starling_agent.contract.router_report import RouterReport

from starling_router.canary import CanaryTraffic

QUIET_SECONDS = 2.0
"""A router is busy until so long after its last request. So requests in a row are news once, and not each of them."""
CANARY_SECONDS = 5.0
"""Counts of a canary are news at most so often, but for its first errors: each report costs the operator a look at the service."""
MOST_WAIT_SECONDS = 60.0


class Demand:
    """Counts open requests. Belongs to the event loop that it is made in; `held` says how many of them wait.

    The report has the canary's, too.
    """

    def __init__(self, held: Callable[[], int], canary: CanaryTraffic) -> None:
        self._held, self._canary = held, canary
        canary.on_news = self._canary_news
        self._open, self._version, self._incarnation = 0, 1, secrets.token_hex(8)
        self._quiet_since: float | None = time.monotonic()
        self._ended_at = 0.0
        self._quiet, self._canary_due = _Timer(self._is_quiet), _Timer(self._bump)
        self._news, self._ends = asyncio.Event(), False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request from its body to its end."""
        self._open += 1
        self._quiet.cancel()
        if self._quiet_since is not None:
            self._quiet_since = None
            self._bump()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._ended_at = time.monotonic()
                self._quiet.begin(QUIET_SECONDS)

    def report(self) -> RouterReport:
        since = self._quiet_since
        quiet = None if since is None else time.monotonic() - since
        return RouterReport(
            version=self._version,
            incarnation=self._incarnation,
            open=self._open,
            held=self._held(),
            quiet_seconds=quiet,
            canary=self._canary.report(),
        )

    async def wait(self, after: int, incarnation: str, seconds: float) -> RouterReport:
        """Returns the report at once if the caller does not know its version, else with the next one or after `seconds`."""
        if self._version <= after and incarnation == self._incarnation and not self._ends:
            try:
                async with asyncio.timeout(min(seconds, MOST_WAIT_SECONDS)):
                    await self._news.wait()
            except TimeoutError:
                pass
        return self.report()

    def end(self) -> None:
        """Answers all callers that wait; later ones do not wait."""
        self._ends = True
        self._quiet.cancel()
        self._canary_due.cancel()
        self._news.set()

    def _canary_news(self, at_once: bool) -> None:
        if at_once:
            self._canary_due.cancel()
            self._bump()
        elif not self._canary_due.runs and not self._ends:
            self._canary_due.begin(CANARY_SECONDS)

    def _is_quiet(self) -> None:
        self._quiet_since = self._ended_at
        self._bump()

    def _bump(self) -> None:
        self._version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()


class _Timer:
    """Calls `due` some time after it began, unless it is cancelled."""

    def __init__(self, due: Callable[[], None]) -> None:
        self._due = due
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def begin(self, seconds: float) -> None:
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._end)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self) -> None:
        self._handle = None
        self._due()
