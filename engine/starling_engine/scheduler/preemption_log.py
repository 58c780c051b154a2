"""The log of preemptions: which request lost its blocks, to which one, and what becomes of its tokens."""

import logging
import math
import time
from collections.abc import Callable

from starling_engine.kv.pool import OutOfBlocks
from starling_engine.request_state import RequestState

logger = logging.getLogger("starling.scheduler")

BURST_SECONDS = 10.0
"""A preemption begins a burst if there was none for so long."""


class PreemptionLog:
    """Logs every preemption at debug level, except the first of a burst at info level."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def add(self, victim: RequestState, grower: RequestState, missing: OutOfBlocks, *, swapped: bool) -> None:
        """Logs that `victim` is preempted, because `grower` needs blocks; `swapped` if its tokens are not computed again."""
        now = self._clock()
        level = logging.INFO if now - self._last >= BURST_SECONDS else logging.DEBUG
        self._last = now
        text = "%s is preempted at %d of %d tokens (%s): %s wants %d blocks, %d free"
        way = "swap" if swapped else "recompute"
        counts = victim.computed, len(victim.tokens)
        logger.log(level, text, victim.record.id, *counts, way, grower.record.id, missing.wanted, missing.free)
