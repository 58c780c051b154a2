"""The time at which this pod is killed. A drain by hand or an autoscaler may leave less than `spec.drain`."""

import asyncio
from collections.abc import Callable

import structlog

MARGIN_SECONDS = 5.0
"""Streams end this long before: their last event takes a moment, and clocks differ."""
log = structlog.get_logger("starling.agent")


class DrainDeadline:
    """The operator sends it, since a kubelet sends its pods only SIGTERM. `end` ends all open streams."""

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Sets the seconds until the pod must have ended. The last call counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds - MARGIN_SECONDS), self._expire)

    def _expire(self) -> None:
        log.info("the pod is about to be killed: its streams end now")
        self.end()
