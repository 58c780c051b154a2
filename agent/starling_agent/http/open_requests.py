"""Open requests. One ends early when its client disconnects, and all of them when the server must end at once."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from starling_agent.http.errors import ShuttingDown

T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected, so there is nothing to answer."""


class OpenRequests:
    """All open requests. The work of each is a task, which can be cancelled while it waits for the engine."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: str | None = None
        self.last_at = -math.inf
        """The loop's time when the last request came."""

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T], *, came: bool = True) -> T:
        """Returns the work's result. Raises ClientGone or ShuttingDown when it was cancelled; it has cleaned up by then.

        `receive` must have given the whole body already, so that its next message is the disconnect. `came` is False for the
        rest of a request that has come before.
        """
        if self._ended is not None:
            work.close()
            raise ShuttingDown(self._ended)
        if came:
            self.last_at = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(_disconnected(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._tasks.discard(task)
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if not task.cancelled():
            return task.result()
        if self._ended is not None:
            raise ShuttingDown(self._ended)
        raise ClientGone

    def end_all(self, reason: str) -> None:
        """Cancels all work and refuses new work: both raise ShuttingDown with the reason."""
        self._ended = reason
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
