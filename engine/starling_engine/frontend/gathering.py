"""Runs coroutines at once, and leaves none behind."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results in order. The first error, or a cancellation, cancels the rest and is raised when these have ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Cancelled requests are aborted in the engine first; else the caller could shut it down meanwhile.
        await asyncio.gather(*tasks, return_exceptions=True)
