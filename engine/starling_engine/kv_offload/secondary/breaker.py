"""A circuit breaker: after a failure nothing is tried for a while, and longer after each further one (Nygard, Release It!, 5.2)."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """Open means: leave it alone. Threads may call at once. `first` and `most` bound the pause, in seconds."""

    def __init__(self, first: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = self._pause = first
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._until: float | None = None
        self._outage: float | None = None
        """When what has not been seen to work since began to fail."""

    @property
    def remaining(self) -> float | None:
        """Seconds until it may be tried again; None while it is closed."""
        until = self._until
        return None if until is None else max(0.0, until - self._clock())

    def trip(self) -> bool:
        """It failed: opens, or stays open for longer. Returns whether an outage begins with that."""
        with self._lock:
            began = self._outage is None
            if began:
                self._outage = self._clock()
            self._until = self._clock() + self._pause
            self._pause = min(2 * self._pause, self._most)
            return began

    def close(self) -> None:
        """It may be tried. The outage is not over before something has worked."""
        self._until = None

    def worked(self) -> float | None:
        """It did what it is for. Returns how long the outage lasted that ends with that, in seconds."""
        if self._outage is None:
            return None
        with self._lock:
            began, self._outage = self._outage, None
            self._pause = self._first
            return None if began is None else self._clock() - began
