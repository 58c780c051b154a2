"""Several engine cores sleep and wake as one engine."""

import asyncio
from collections.abc import Sequence

from starling_engine.core.client import CoreClient
from starling_engine.sleep import TAGS, Mode, Tag


async def put_to_sleep(cores: Sequence[CoreClient], level: int, mode: Mode) -> None:
    """All of them, or none: those that fell asleep although another could not are woken again. Raises as `CoreClient.sleep`."""
    awake = [core for core in cores if not core.sleep_state.asleep]
    outcomes = await asyncio.gather(*(core.sleep(level, mode) for core in cores), return_exceptions=True)
    failures = [outcome for outcome in outcomes if outcome is not None]
    if failures:
        slept = [core for core, outcome in zip(cores, outcomes, strict=True) if outcome is None and core in awake]
        await asyncio.gather(*(core.wake_up(list(TAGS)) for core in slept), return_exceptions=True)
        raise failures[0]


async def wake(cores: Sequence[CoreClient], tags: list[Tag]) -> None:
    """Those that can wake do, whatever becomes of the others. Raises as `CoreClient.wake_up`."""
    outcomes = await asyncio.gather(*(core.wake_up(tags) for core in cores), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


def sleep_level(cores: Sequence[CoreClient]) -> int:
    """At which each of them sleeps at least; 0 while one is awake, or there is none."""
    return min((core.sleep_state.level for core in cores), default=0)
