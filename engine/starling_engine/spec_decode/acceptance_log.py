"""Log lines about drafts: how many were accepted of late."""

import logging
import time
from collections.abc import Callable

from starling_engine.delta import Stats

logger = logging.getLogger("starling.speculation")

LOG_SECONDS = 10.0
"""Time between two lines, while there are drafts."""


class AcceptanceLog:
    """Logs what `stats` gained since the last line."""

    def __init__(self, stats: Stats, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._logged = clock()
        self._before = (0, 0, 0)

    def update(self) -> None:
        """Writes a line if it is time for one. Called when drafts were counted."""
        now = self._clock()
        if now - self._logged < LOG_SECONDS:
            return
        stats = self._stats
        counts = stats.spec_drafts_total, stats.spec_draft_tokens_total, stats.spec_accepted_tokens_total
        drafts, proposed, accepted = (new - old for new, old in zip(counts, self._before, strict=True))
        seconds, self._logged, self._before = now - self._logged, now, counts
        text = "%d of %d draft tokens accepted (%.0f %%) in %.0f s; rows with drafts gave %.2f tokens on average"
        logger.info(text, accepted, proposed, 100 * accepted / proposed, seconds, 1 + accepted / drafts)
