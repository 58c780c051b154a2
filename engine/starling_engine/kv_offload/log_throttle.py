"""Repeated log lines come now and then: a fault that lasts should stay known, and not fill the log."""

import math

LOG_INTERVAL = 600.0
"""Seconds between two lines that say the same."""


class LogThrottle:
    """Throttle of one kind of line; `now` is in seconds, by any clock."""

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def is_due(self, now: float) -> bool:
        """Returns whether the line is to be logged now, and counts on that."""
        if now - self._logged_at <= LOG_INTERVAL:
            return False
        self._logged_at = now
        return True
