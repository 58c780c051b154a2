"""The sleep that the operator orders while nobody asks the service for anything: `spec.scaling.standby`."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Never

import structlog
from starling_engine import AsyncEngine
from starling_engine.errors import EngineDead, SleepRefused, StarlingError
from starling_engine.sleep import LEVELS

from starling_agent.http.errors import ApiError

RETRY_SECONDS = 1.0
"""Seconds until an engine that could not sleep, or wake, is asked again: requests may run, or a file be missing."""
log = structlog.get_logger("starling.agent")


class Standby:
    """Each poll of the operator brings the order, so that one may be lost. An engine that people put to sleep is not woken."""

    def __init__(self) -> None:
        self._level: int | None = None
        """The last order; None before the first."""
        self._changed = asyncio.Event()
        self._has_slept = False
        """Cores may sleep by an order, or by one to an agent that was there before this one."""

    def order(self, level: float) -> None:
        """Sets the level at which the engine is to sleep; 0: not at all. Raises ApiError 400."""
        if level not in (0, *LEVELS):
            raise ApiError(400, f"sleep must be 0, 1 or 2, got {level:g}", param="sleep", code="invalid_value")
        if level != self._level:
            self._level = int(level)
            self._changed.set()

    async def follow(self, engine: AsyncEngine, on_error: Callable[[str | None], None]) -> Never:
        """Carries out orders for as long as the engine lives. Raises EngineDead.

        An engine whose requests run stays awake until they have ended. What else keeps it from an order goes to `on_error`, and
        None once that is over.
        """
        # Cores of other nodes sleep on where the agent that ordered it has died. People put all to sleep, or none.
        self._has_slept, failed = engine.sleeps_in_part, False
        while True:
            self._changed.clear()
            try:
                await self._carry_out(engine)
            except EngineDead:
                raise
            except SleepRefused as refused:
                log.debug("the engine does not sleep yet", cause=str(refused))
            except StarlingError as error:
                failed = True
                on_error(str(error))
            else:
                if failed:
                    failed = False
                    on_error(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS)

    async def _carry_out(self, engine: AsyncEngine) -> None:
        """Carries out the last order. Raises as `AsyncEngine.sleep` and `wake_up` do."""
        level, now = self._level, engine.sleep_level
        if level == 0 and self._has_slept:
            await engine.wake_up()
            self._has_slept = False
            log.info("the engine is woken for the service")
        elif level and now < level and (self._has_slept or not now):
            self._has_slept = True  # even if it fails: some of its cores may sleep then
            await engine.sleep(level)
            log.info("the engine sleeps while nobody asks the service", level=level)
