"""Decides when each service is looked at: woken by changes and timers, never twice at once, a few services at a time."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from starling_operator import metrics
from starling_operator.cluster.lease import LeaseLost
from starling_operator.logs import Key, about

MOST_BACKOFF = 60.0
log = logging.getLogger(__name__)


class Reconciler:
    """Wake-ups of one service that come while it waits or runs become one. `reconcile` returns the seconds to its next one."""

    def __init__(self, reconcile: Callable[[Key], Awaitable[float | None]], parallel: int) -> None:
        self._reconcile = reconcile
        self._parallel = parallel
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, float] = {}
        self._running: dict[Key, float] = {}
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._last_end = time.monotonic()

    def wake(self, key: Key, after: float = 0.0) -> None:
        """Looks at the service at the earliest of all times asked for."""
        if after > 0:
            self._wake_later(key, after)
        elif key in self._running:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._queue.put_nowait(key)

    async def run(self) -> None:
        """Never ends by itself."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._parallel):
                group.create_task(self._work())

    def stuck(self, limit: float) -> str | None:
        """What has been running, or due with nothing finishing, for longer than `limit` seconds."""
        now = time.monotonic()
        for key, since in self._running.items():
            if now - since > limit:
                return f"the reconcile of {'/'.join(key)} has been running for {now - since:.0f} s"
        oldest = max(self._last_end, min(self._waiting.values(), default=now))
        if self._waiting and now - oldest > limit:
            return f"{len(self._waiting)} services are due and none was reconciled for {now - oldest:.0f} s"
        return None

    def _wake_later(self, key: Key, after: float) -> None:
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + after:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_later(after, self._ring, key)

    def _ring(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.wake(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            # A reconcile that finds nothing to do awaits nothing: many in a row would keep the Lease from being renewed.
            await asyncio.sleep(0)
            del self._waiting[key]
            self._cancel_timer(key)
            self._running[key] = time.monotonic()
            after = await self._run_one(key)
            metrics.RECONCILE_SECONDS.observe(time.monotonic() - self._running.pop(key))
            self._last_end = time.monotonic()
            if after is not None:
                self.wake(key, max(after, 0.01))
            if key in self._again:
                self._again.discard(key)
                self.wake(key)

    async def _run_one(self, key: Key) -> float | None:
        """A failure is this service's alone: it comes again after a while, the others go on."""
        metrics.RECONCILES.inc()
        try:
            after = await self._reconcile(key)
        except LeaseLost as lost:
            log.warning("nothing is written: %s", lost, extra=about(key))
            return MOST_BACKOFF
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end the work on other services
            return self._failed(key, error)
        self._failures.pop(key, None)
        return after

    def _failed(self, key: Key, error: Exception) -> float:
        metrics.RECONCILE_ERRORS.inc()
        tries = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(MOST_BACKOFF, 2.0 ** (tries - 1)) * random.uniform(0.8, 1.2)
        wait = max(wait, getattr(error, "retry_after", None) or 0.0)
        log.error("the reconcile failed, again in %.0f s: %s", wait, error, exc_info=error, extra=about(key))
        return wait
