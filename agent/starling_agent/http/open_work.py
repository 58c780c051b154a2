"""Work done for clients: it ends early when its client goes, and all of it when the server must end at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from starling_agent.http.errors import ShuttingDown

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""


class OpenWork:
    """The work in hand. Pieces of it run as tasks, so that each can be cancelled while it waits for the engine."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: str | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Raises ClientGone or ShuttingDown when it was ended early; it has cleaned up by then.

        `receive` must have given the whole body already: what comes next is the disconnect.
        """
        if self._ended is not None:
            work.close()
            raise ShuttingDown(self._ended)
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
        """Cancels all work, now and to come; each piece raises ShuttingDown with the reason."""
        self._ended = reason
        for task in self._tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
