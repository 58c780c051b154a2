"""Keeps a folder that is out of order from slowing serving down: one log line, then silence, and a try now and then."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from threading import Lock

from starling_engine.kv_offload.secondary.base import TierError

logger = logging.getLogger("starling.tiers")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between tries. What fails again within the longest of them counts as the same outage."""

SLOW_READ, SLOW_WRITE = 3.0, 15.0
"""Seconds an operation may take; computing a chunk anew takes less."""

FULL = frozenset({ENOSPC, EDQUOT})
WRITING = FULL | {EROFS, EACCES, EPERM}
"""What a write may meet while reads go on."""


class Breaker:
    """Lets operations through while `what` works, and a single one from time to time while it does not.

    An operation that raises OSError, takes longer than it may, or has not come back for that long opens it. While one hangs, no
    other is tried: it would only hang a thread more.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self._lock = Lock()
        self._running: dict[object, float] = {}
        self._hanging: set[object] = set()
        self._since: float | None = None
        self._until = 0.0
        self._closed = -math.inf
        self._told = False
        self._pause = FIRST_PAUSE
        self._trying: object | None = None
        self.failed = 0
        self.refused = 0

    @property
    def is_open(self) -> bool:
        """Whether `what` counts as out of order."""
        return self._since is not None

    @contextmanager
    def attempt(self, slow: float, others: Collection[int] = ()) -> Iterator[None]:
        """Around one operation of at most `slow` seconds. Raises FarError for what is refused, and in place of OSError.

        An OSError whose number is in `others` says nothing about `what`, and goes on as it is; so does a FarError.
        """
        token = object()
        began = self._admit(token, slow)
        try:
            yield
        except OSError as error:
            if error.errno in others:
                self._end(token, news=False)
                raise
            self._end(token, str(error))
            raise TierError(f"{self._what}: {error}") from error
        except TierError:
            self._end(token, news=False)
            raise
        except BaseException:
            self._end(token, self._slowness(began, slow))
            raise
        self._end(token, self._slowness(began, slow))

    def note(self, reason: str) -> None:
        """Opens it for what failed elsewhere."""
        with self._lock:
            self._open(reason, tried=False)

    def _slowness(self, began: float, slow: float) -> str | None:
        took = self._clock() - began
        return f"too slow, an operation took {took:.1f} s" if took > slow else None

    def _admit(self, token: object, slow: float) -> float:
        with self._lock:
            now = self._clock()
            self._find_hanging(now)
            if self._since is not None:
                if self._trying is not None or self._hanging or now < self._until:
                    self.refused += 1
                    raise TierError(f"{self._what} is out of order")
                self._trying = token
            self._running[token] = now + slow
            return now

    def _find_hanging(self, now: float) -> None:
        hanging = [token for token, deadline in self._running.items() if deadline < now]
        for token in hanging:
            del self._running[token]
        if hanging:
            self._hanging.update(hanging)
            self._open("an operation hangs", tried=self._trying in hanging)

    def _end(self, token: object, failure: str | None = None, news: bool = True) -> None:
        with self._lock:
            self._running.pop(token, None)
            self._hanging.discard(token)
            tried = self._trying is token
            if tried:
                self._trying = None
            if failure is not None:
                self._open(failure, tried)
            elif tried and news:
                self._close()

    def _open(self, reason: str, tried: bool) -> None:
        """What was under way when it opened says nothing new."""
        self.failed += 1
        now = self._clock()
        if self._since is None:
            self._since, self._told = now, False
            self._pause = FIRST_PAUSE if now - self._closed > LONGEST_PAUSE else self._longer()
        elif tried:
            self._pause = self._longer()
        else:
            return
        self._until = now + self._pause
        if not self._told and max(self._since - self._closed, now - self._since) > LONGEST_PAUSE:
            self._told = True
            logger.warning("%s: serving goes on without it and tries again at times: %s", self._what, reason)

    def _longer(self) -> float:
        return min(2 * self._pause, LONGEST_PAUSE)

    def _close(self) -> None:
        assert self._since is not None, "only what is open is tried"
        self._closed = self._clock()
        if self._told:
            logger.warning("%s: works again after %.0f s", self._what, self._closed - self._since)
        self._since = None


class FolderBreakers:
    """Two breakers, as reads go on where only writing fails: a full disk, a read-only one."""

    def __init__(self, root: object, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = Breaker(f"the KV cache's folder {root}", clock)
        self.writes = Breaker(f"writing to the KV cache's folder {root}", clock)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raises FarError."""
        with self.folder.attempt(SLOW_READ):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises FarError."""
        with self.writes.attempt(SLOW_WRITE), self.folder.attempt(math.inf, others=WRITING):
            yield

    def note(self, error: OSError) -> None:
        """What failed in the background, where writing is."""
        (self.writes if error.errno in WRITING else self.folder).note(str(error))
