"""A request on its way, from the side of whoever waits for it."""

import asyncio

from starling_engine.core.client import CoreClient
from starling_engine.core.messages import Add
from starling_engine.delta import Delta
from starling_engine.errors import InvalidRequest, QueueFull, RequestFailed
from starling_engine.frontend.assembler import Assembler
from starling_engine.request import EngineRequest

RETRY_AFTER = 1.0
"""Seconds after which a caller that found the queue full may try again."""


class Run:
    """One request on its way: its sequences in the core, and what has come of them."""

    def __init__(self, client: CoreClient, assembler: Assembler) -> None:
        self.assembler = assembler
        self._client = client
        self._open: set[str] = set()
        self._wake = asyncio.Event()
        self._failure: Delta | None = None
        self._to_abort: list[str] = []

    async def add(self, index: int, record: EngineRequest) -> None:
        self._open.add(record.id)
        await self._client.add(Add(record), lambda delta: self._take(index, delta))

    def _take(self, index: int, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self._open.discard(delta.id)
        if delta.error is not None:
            self._failure = delta
        elif self.assembler.push(index, delta) and delta.finish_reason is None:
            self._to_abort.append(delta.id)
        self._wake.set()

    async def wait(self) -> None:
        """Until something came. Raises what ended the request."""
        await self._wake.wait()
        self._wake.clear()
        if self._to_abort:
            aborted, self._to_abort = self._to_abort, []
            self._open.difference_update(aborted)
            await self._client.abort(aborted)
        if self._failure is not None:
            self._client.check()
            raise_failure(self._failure)

    async def close(self) -> None:
        """Aborts what is still open."""
        if self._open:
            await self._client.abort(list(self._open))


def raise_failure(delta: Delta) -> None:
    """Raises the error that a delta carries, if it does."""
    if delta.error is None:
        return
    if delta.refused:
        raise QueueFull(delta.error, RETRY_AFTER)
    if delta.error_param is not None:
        raise InvalidRequest(delta.error, delta.error_param)
    raise RequestFailed(delta.error)
