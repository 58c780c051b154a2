"""A circuit breaker: after a failure nothing is tried for a while, and longer after each further one (Nygard, Release It!, 5.2)."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import RLock

from starling_engine.kv_offload.secondary.base import TierError

logger = logging.getLogger("starling.tiers")
Clock = Callable[[], float]


class CircuitBreaker:
    """Closed while operations work, open for a pause after a failure. Several threads call it.

    Pauses last from `first` to `longest` seconds: each failed try doubles them, until something has worked. Outages of what has a
    `name` are logged. A failure within `settles` seconds after an outage continues it: the pause goes on growing, and nothing is
    logged before it has lasted as long.
    """

    def __init__(
        self, first: float, longest: float, clock: Clock = time.monotonic, *, name: str = "", settles: float = 0.0
    ) -> None:
        self._first, self._longest, self._settles = first, longest, settles
        self._name, self._clock = name, clock
        self._lock = RLock()
        self._pause = first
        self._until = 0.0
        self._since: float | None = None
        """Start of the outage; None while the breaker is closed."""
        self._worked_at = -math.inf
        """End of the last outage."""
        self._logged = False
        self._running: dict[object, tuple[float, float]] = {}
        """Start and time limit of each operation under way."""
        self.failed = 0
        self.refused = 0

    @property
    def is_open(self) -> bool:
        return self._since is not None

    @property
    def remaining(self) -> float | None:
        """Seconds until the next try; None while the breaker is closed."""
        return None if self._since is None else max(0.0, self._until - self._clock())

    def trip(self, reason: str = "", *, tried: bool = True) -> None:
        """Opens the breaker. Where it is open already, only the failure of what was tried meanwhile makes the pause longer."""
        with self._lock:
            self.failed += 1
            now = self._clock()
            if self._since is None:
                self._since, self._logged = now, False
                if now - self._worked_at >= self._settles:
                    self._pause = self._first
            elif not tried:
                return
            self._until = now + self._pause
            self._pause = min(2 * self._pause, self._longest)
            if not self._logged and max(self._since - self._worked_at, now - self._since) >= self._settles:
                self._logged = True
                self._log("%s is out of order (%s); serving goes on without it", reason)

    def worked(self) -> None:
        """Closes the breaker: something has worked."""
        if self._since is None:
            return
        with self._lock:
            if self._since is not None:
                self._worked_at = self._clock()
                if self._logged:
                    self._log("%s works again, after %.1f s", self._worked_at - self._since)
                self._since = None

    def _log(self, text: str, what: object) -> None:
        if self._name:
            logger.warning(text, self._name, what)

    @contextmanager
    def attempt(self, timeout: float, ignored: Collection[int] = ()) -> Iterator[None]:
        """Runs one operation, where that is allowed; while the breaker is open, only one after each pause is.

        An operation fails by OSError, or where it takes more than `timeout` seconds. While one is still under way after that, all
        others are refused: they would hang with it. A TierError, or an OSError whose number is in `ignored`, is no failure here and
        goes on as it is. Raises TierError for what is refused, and in place of other OSErrors.
        """
        operation = object()
        self._admit(operation, timeout)
        failure, says_nothing = None, False
        try:
            yield
        except (OSError, TierError) as error:
            says_nothing = isinstance(error, TierError) or error.errno in ignored
            if says_nothing:
                raise
            failure = str(error)
            raise TierError(f"{self._name}: {error}") from error
        finally:
            self._finish(operation, failure, says_nothing)

    def _admit(self, operation: object, timeout: float) -> None:
        """Raises TierError for what is refused."""
        with self._lock:
            now = self._clock()
            hangs = any(now - began > limit for began, limit in self._running.values())
            if hangs and not self.is_open:
                self.trip("an operation hangs")
            is_tried = any(began >= self._until for began, _ in self._running.values())
            if self.is_open and (hangs or is_tried or now < self._until):
                self.refused += 1
                raise TierError(f"{self._name} is out of order")
            self._running[operation] = now, timeout

    def _finish(self, operation: object, failure: str | None, says_nothing: bool) -> None:
        with self._lock:
            began, timeout = self._running.pop(operation)
            took, tried = self._clock() - began, began >= self._until
            if failure is None and took > timeout:
                failure = f"an operation took {took:.1f} s, more than {timeout:.1f}"
            if says_nothing:
                return
            if failure is not None:
                self.trip(failure, tried=tried)
            elif tried:
                self.worked()
