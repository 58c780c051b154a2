"""Orders of sleep to an engine whose cores do not all obey."""

import asyncio
import contextlib
from typing import Any, cast

from starling_agent.node.standby import Standby
from starling_engine import AsyncEngine
from starling_engine.errors import SleepFailed


class Engine:
    """An engine of two cores, at levels of sleep; `fails` has the second one stay as it is."""

    def __init__(self, *levels: int) -> None:
        self.levels = list(levels)
        self.fails = False

    @property
    def sleep_level(self) -> int:
        return min(self.levels)

    @property
    def sleeps_in_part(self) -> bool:
        return not all(self.levels) and any(self.levels)

    async def sleep(self, level: int) -> None:
        self.levels = [max(level, one) for one in self.levels]
        if self.fails:
            self.levels[1] = 0
            raise SleepFailed("core 1 could not fall asleep")

    async def wake_up(self) -> None:
        self.levels = [0, 0]


async def turns() -> None:
    """Lets all that is ready go on, as long as something is."""
    for _ in range(20):
        await asyncio.sleep(0)


async def after(engine: Engine, *orders: int) -> list[int]:
    """The levels of an engine's cores after orders that it had time to follow."""
    standby, errors = Standby(), list[str | None]()
    following = asyncio.create_task(standby.follow(cast(AsyncEngine, cast(Any, engine)), errors.append))
    await turns()
    for level in orders:
        standby.order(level)
        await turns()
    assert not following.done()
    assert errors == (["core 1 could not fall asleep", None] if engine.fails else [])
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    return engine.levels


async def test_cores_wake_that_fell_asleep_when_another_could_not() -> None:
    engine = Engine(0, 0)
    engine.fails = True
    assert await after(engine, 2, 0) == [0, 0]


async def test_an_engine_that_people_put_to_sleep_sleeps_no_deeper_and_is_not_woken() -> None:
    assert await after(Engine(1, 1), 2, 0) == [1, 1]
    assert await after(Engine(0, 0), 1, 2) == [2, 2]


async def test_a_new_agent_wakes_cores_that_another_one_left_asleep_once_it_is_told() -> None:
    assert await after(Engine(0, 2)) == [0, 2]
    assert await after(Engine(0, 2), 0) == [0, 0]
