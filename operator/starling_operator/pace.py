"""Lets the news of a large service wait for each other: each decision looks at all of its pods, whichever of them has news."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from starling_operator.logs import Key

PAUSE_RATIO = 4.0
"""News waits so many times as long as a decision takes: decisions of a quarter of a second or less take about a fifth of a core."""
MOST_SECONDS = 1.0
"""News waits for no longer. The status is not written more often, either."""


class Pace:
    """Processor seconds of the last whole decision about each service, or of the present one once that has taken more."""

    def __init__(self) -> None:
        self._last: dict[Key, float] = {}
        self._spent: dict[Key, float] = {}

    def begin(self, key: Key) -> None:
        """Begins a decision, which may have several parts."""
        self._last[key] = self._spent.get(key, 0.0)
        self._spent[key] = 0.0

    @contextmanager
    def part(self, key: Key) -> Iterator[None]:
        """Counts a part of a decision. Nothing is awaited in it, so that the processor works at nothing else."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._spent[key] = self._spent.get(key, 0.0) + time.thread_time() - began

    def pause(self, key: Key) -> float:
        """Returns for how many seconds news of the service may wait for more of it."""
        return min(MOST_SECONDS, PAUSE_RATIO * max(self._last.get(key, 0.0), self._spent.get(key, 0.0)))

    def forget(self, key: Key) -> None:
        self._last.pop(key, None)
        self._spent.pop(key, None)
