"""Waiting for asyncio tasks."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TypeVar

logger = logging.getLogger("starling.elastic")

Result = TypeVar("Result")


async def gather_or_cancel(work: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """Runs all at once; returns their results, in order. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def run_to_end(work: Coroutine[None, None, None]) -> None:
    """Runs to the end even if the caller is cancelled meanwhile."""
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
