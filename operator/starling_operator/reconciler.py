"""Decides when each service is reconciled: changes and timers wake it, a few services run at a time, and none twice at once."""

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
    """Queue of services. Wake-ups of one that waits or runs become one; `reconcile` returns the seconds until the next."""

    def __init__(self, reconcile: Callable[[Key], Awaitable[float | None]], parallel: int) -> None:
        self._reconcile = reconcile
        self._parallel = parallel
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, float] = {}
        self._running: dict[Key, float] = {}
        self._rerun: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._last_end = time.monotonic()

    def wake(self, key: Key, after: float = 0.0) -> None:
        """Reconciles the service at the earliest of all requested times."""
        if after > 0:
            self._wake_later(key, after)
        elif key in self._running:
            self._rerun.add(key)
        elif key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._queue.put_nowait(key)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._parallel):
                group.create_task(self._work())

    def stuck(self, limit: float) -> str | None:
        """Returns which reconcile has run for longer than `limit` seconds, or that none ended for so long though some are due."""
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
        self._timers[key] = loop.call_later(after, self._on_timer, key)

    def _on_timer(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.wake(key)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            # A reconcile with nothing to do awaits nothing; many in a row would block the loop.
            await asyncio.sleep(0)
            del self._waiting[key]
            self._cancel_timer(key)
            self._running[key] = time.monotonic()
            after = await self._run_one(key)
            metrics.RECONCILE_SECONDS.observe(time.monotonic() - self._running.pop(key))
            self._last_end = time.monotonic()
            if after is not None:
                self.wake(key, max(after, 0.01))
            if key in self._rerun:
                self._rerun.discard(key)
                self.wake(key)

    async def _run_one(self, key: Key) -> float | None:
        """Retries this service alone after a failure; the others go on."""
        metrics.RECONCILES.inc()
        try:
            after = await self._reconcile(key)
        except LeaseLost as lost:
            log.warning("nothing is written: %s", lost, extra=about(key))
            return MOST_BACKOFF
        except Exception as error:  # noqa: BLE001  # no error may end the work on other services
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
