"""What lasts is said now and then: a fault that stays should stay known, and not fill the log."""

import math

SAID_EVERY = 600.0
"""Seconds between two lines of the log that say the same."""


class Seldom:
    """Of one kind of line; `now` is in seconds, by any clock."""

    def __init__(self) -> None:
        self._said_at = -math.inf

    def is_due(self, now: float) -> bool:
        """Whether to say it; whoever is told so does."""
        if now - self._said_at <= SAID_EVERY:
            return False
        self._said_at = now
        return True
