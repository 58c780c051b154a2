"""A request on its way, from the side of whoever waits for it."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from starling_engine.core.client import CoreClient
from starling_engine.delta import MOVED, Delta
from starling_engine.errors import EngineAsleep, InvalidRequest, QueueFull, RequestFailed, StarlingError
from starling_engine.frontend.assembler import Assembler
from starling_engine.request import EngineRequest

logger = logging.getLogger("starling.frontend")

RETRY_AFTER = 1.0
"""Seconds after which a caller that found the queue full may try again."""


class RequestProgress:
    """One request on its way: the resume records of its sequences, and what has come of them."""

    def __init__(self, choose: Callable[[], CoreClient], assembler: Assembler) -> None:
        """`choose` gives the core for the request; asked again when the one that had it hands it over."""
        self.assembler = assembler
        self.records: dict[str, EngineRequest] = {}
        """By id, of the sequences that are open, with the output so far: what another core would need to go on."""
        self._choose = choose
        self._client = choose()
        self._moves: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._failure: Delta | None = None

    async def add(self, index: int, record: EngineRequest) -> None:
        """Raises EngineDead, or InvalidRequest for an id that is in use."""
        self.records[record.id] = record
        try:
            await self._client.add(record, lambda delta: self._take(index, delta))
        except BaseException:
            del self.records[record.id]
            raise

    def _take(self, index: int, delta: Delta) -> None:
        if delta.finish_reason == MOVED:
            self._move(index, delta.id)
            return
        self._wake.set()
        if delta.error is not None:
            self._failure = delta
        else:
            self._assemble(index, delta)
        if delta.finish_reason is not None:
            self.records.pop(delta.id, None)
        elif delta.id in self.records:
            self.records[delta.id].output_ids.extend(delta.tokens)
            self.records[delta.id].scored += len(delta.prompt_logprobs or ())

    def _move(self, index: int, request_id: str) -> None:
        """Continues a sequence on another core: what it has so far is in its record, and more of it does not come from before."""
        record = self.records.get(request_id)
        if record is None:
            return
        record.attempt += 1
        if record.output_ids:
            record.params = msgspec.structs.replace(record.params, prompt_logprobs=None)
        if not self._client.taking:
            self._client = self._choose()
        task = asyncio.get_running_loop().create_task(self._resend(index, record))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _resend(self, index: int, record: EngineRequest) -> None:
        try:
            await self.add(index, record)
        except StarlingError as error:
            self._failure = Delta(record.id, record.attempt, finish_reason="error", error=f"could not be moved: {error}")
            self._wake.set()

    def _assemble(self, index: int, delta: Delta) -> None:
        """A stop string ends the sequence in the core at once, whether or not anybody reads."""
        try:
            stopped = self.assembler.push(index, delta)
        except Exception as error:
            logger.exception("output of request %s could not be read", delta.id)
            self._failure = Delta(delta.id, delta.attempt, finish_reason="error", error=f"detokenizing failed: {error}")
            stopped = True
        if stopped and delta.finish_reason is None:
            self._client.abort([delta.id])
            self.records.pop(delta.id, None)

    async def wait(self) -> None:
        """Until something came. Raises what ended the request."""
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            self._client.check()
            raise_failure(self._failure)

    def close(self) -> None:
        """Aborts what is still open."""
        for move in self._moves:
            move.cancel()
        if self.records:
            self._client.abort(list(self.records))


def raise_failure(delta: Delta) -> None:
    """Raises the error that a delta carries, if it does."""
    if delta.error is None:
        return
    if delta.asleep:
        raise EngineAsleep(delta.error)
    if delta.refused:
        raise QueueFull(delta.error, RETRY_AFTER)
    if delta.error_param is not None:
        raise InvalidRequest(delta.error, delta.error_param)
    raise RequestFailed(delta.error)
