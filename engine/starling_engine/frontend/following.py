"""Follows all cores of a frontend: what they have cached is one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from starling_engine.frontend.cores import CoreClients
from starling_engine.kv.changes import CacheChanges, CoreChanges

LOOK_SECONDS = 0.5
MOST_WAITING = 10_000
"""Messages that wait for a slow reader."""


async def follow_caches(cores: CoreClients) -> AsyncGenerator[Sequence[CoreChanges]]:
    """Yields what the cores that serve have cached, and then what changes; nothing, twice a second, while nothing does.

    It ends when a core comes, goes or fails, and where the reader is far behind. One that begins then tells all anew.
    """
    followed, inbox = set(cores.serving), _Inbox()
    with ExitStack() as stack:
        for number, client in enumerate(followed):
            stack.enter_context(client.following(partial(inbox.put, number)))
        while followed and followed == set(cores.serving) and not inbox.ended:
            yield await inbox.take()


class _Inbox:
    """Has what cores told since the last `take`."""

    def __init__(self) -> None:
        self.ended = False
        self._waiting: list[CoreChanges] = []
        self._arrived = asyncio.Event()

    def put(self, core: int, changes: CacheChanges | None) -> None:
        if changes is None or len(self._waiting) == MOST_WAITING:
            self.ended = True
        else:
            self._waiting.append(CoreChanges(changes, core))
        self._arrived.set()

    async def take(self) -> Sequence[CoreChanges]:
        """Returns what there is, and waits LOOK_SECONDS for the first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._arrived.wait()
        self._arrived.clear()
        waiting, self._waiting = self._waiting, []
        return waiting
