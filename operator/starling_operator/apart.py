"""A coroutine in a thread with a loop of its own: for what must never wait behind the main loop's work."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


async def run_apart(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Until `work` ends, with what it raised; cancelled, it is cancelled there, and has ended when this returns."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())
    served = asyncio.ensure_future(asyncio.to_thread(_serve, loop, task))
    try:
        await asyncio.shield(served)
    except asyncio.CancelledError:
        with suppress(RuntimeError):  # it ended just now
            loop.call_soon_threadsafe(task.cancel)
        await served
        raise
    task.result()


def _serve(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Its outcome stays in the task."""
    asyncio.set_event_loop(loop)
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
