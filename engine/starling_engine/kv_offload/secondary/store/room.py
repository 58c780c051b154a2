"""A store that is full: it makes room in a while, and can be read from meanwhile."""

import logging
import threading
import time
from collections.abc import Callable

from starling_engine.kv_offload.log_throttle import Seldom
from starling_engine.kv_offload.secondary.breaker import Breaker

logger = logging.getLogger("starling.store")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0


class Room:
    """Of the store at `address`. Threads may call at once."""

    def __init__(self, address: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self._breaker = Breaker(FIRST_PAUSE, LONGEST_PAUSE, clock)
        self._lock = threading.Lock()
        self._missing = Seldom()

    @property
    def is_expected(self) -> bool:
        """Whether a write is worth trying."""
        return not self._breaker.remaining

    def was_missing(self) -> None:
        """A write was refused for lack of it."""
        self._breaker.trip()
        with self._lock:
            says = self._missing.is_due(self._clock())
        if says:
            logger.warning("the store at %s has no room; what it does not take is kept here only", self._address)

    def was_there(self) -> None:
        """A write was taken."""
        self._breaker.close()
        self._breaker.worked()
