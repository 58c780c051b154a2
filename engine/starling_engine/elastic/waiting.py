"""Ways to wait for other tasks."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TypeVar

logger = logging.getLogger("starling.elastic")

Result = TypeVar("Result")


async def at_once(work: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """What each gives, in their order. The first failure ends the waiting for the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def to_its_end(work: Coroutine[None, None, None]) -> None:
    """Whatever cancels the caller meanwhile comes too late."""
    task = asyncio.ensure_future(work)
    while True:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            logger.info("cancelled too late: the commit has begun")
            caller = asyncio.current_task()
            assert caller is not None
            caller.uncancel()
