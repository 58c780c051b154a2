"""When this pod is killed, which may be sooner than `spec.drain` says: a drain by hand or an autoscaler may give less."""

import asyncio
from collections.abc import Callable

import structlog

MARGIN_SECONDS = 5.0
"""Streams end so long before: to say so takes a moment, and clocks differ."""
log = structlog.get_logger("starling.agent")


class Deadline:
    """The kubelet tells its pods nothing but SIGTERM; the operator sees how long Kubernetes waits. `end` ends all open streams."""

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, seconds: float) -> None:
        """The pod has to be gone in so many seconds. The last word counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds - MARGIN_SECONDS), self._over)

    def _over(self) -> None:
        log.info("the pod is about to be killed: its streams end now")
        self.end()
