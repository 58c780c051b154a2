"""A request on its way, for the caller that waits for it."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from starling_engine.core.client import CoreClient
from starling_engine.delta import MOVED, Delta
from starling_engine.errors import RETRY_AFTER, EngineAsleep, InvalidRequest, QueueFull, RequestFailed, StarlingError
from starling_engine.frontend.assembler import Assembler
from starling_engine.outputs import EarlierRun, RequestOutput, StreamDelta
from starling_engine.request import EngineRequest

logger = logging.getLogger("starling.frontend")


class RequestProgress:
    """A request on its way: the resume records of its sequences, and their output so far. Leaving its `with` block aborts it."""

    def __init__(self, choose: Callable[[], CoreClient], assembler: Assembler) -> None:
        """`choose` returns a core for the request; it is called again when a core hands the request over."""
        self.assembler = assembler
        self.records: dict[str, EngineRequest] = {}
        """Records of the open sequences by id, with the output so far: another core could continue from them."""
        self._choose = choose
        self._client = choose()
        self._resends: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._failure: Delta | None = None
        self._replayed: StreamDelta | None = None
        self._end_taken = False

    def __enter__(self) -> "RequestProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def replay(self, earlier: EarlierRun) -> None:
        """Begins with what an earlier run had; the first gains are these alone. Called before any sequence is added."""
        self._replayed = self.assembler.replay(earlier)

    async def add(self, index: int, record: EngineRequest) -> None:
        """Sends a sequence to the core. Raises EngineDead, or InvalidRequest for an id that is in use."""
        self.records[record.id] = record
        try:
            await self._client.add(record, lambda delta: self._receive(index, delta))
        except BaseException:
            del self.records[record.id]
            raise

    def _receive(self, index: int, delta: Delta) -> None:
        if delta.finish_reason == MOVED:
            self._continue_elsewhere(index, delta.id)
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
            self.records[delta.id].num_prompt_logprobs_sent += len(delta.prompt_logprobs or ())

    def _continue_elsewhere(self, index: int, request_id: str) -> None:
        """Continues a sequence on another core, from its record: the core before sends no more of it."""
        record = self.records.get(request_id)
        if record is None:
            return
        record.attempt += 1
        if record.output_ids:
            record.params = msgspec.structs.replace(record.params, prompt_logprobs=None)
        if not self._client.taking:
            self._client = self._choose()
        task = asyncio.get_running_loop().create_task(self._resend(index, record))
        self._resends.add(task)
        task.add_done_callback(self._resends.discard)

    async def _resend(self, index: int, record: EngineRequest) -> None:
        try:
            await self.add(index, record)
        except StarlingError as error:
            self._failure = Delta(record.id, record.attempt, finish_reason="error", error=f"could not be moved: {error}")
            self._wake.set()

    def _assemble(self, index: int, delta: Delta) -> None:
        """Adds a delta to the output. A stop string ends the sequence in the core at once, whether or not anybody reads."""
        try:
            stopped = self.assembler.push(index, delta)
        except Exception as error:
            logger.exception("output of request %s could not be read", delta.id)
            self._failure = Delta(delta.id, delta.attempt, finish_reason="error", error=f"detokenizing failed: {error}")
            stopped = True
        if stopped and delta.finish_reason is None:
            self._client.abort([delta.id])
            self.records.pop(delta.id, None)

    async def next(self) -> StreamDelta | None:
        """Waits for the request's next gains; None after the last ones. Raises the error that ended it."""
        if (replayed := self._replayed) is not None:
            self._replayed, self._end_taken = None, replayed.finished
            return replayed
        # Ends by the gains, not by the assembler: that may finish while the reader is busy with earlier gains.
        while not self._end_taken:
            await self._wait()
            if (gains := self.assembler.take()) is not None:
                self._end_taken = gains.finished
                return gains
        return None

    async def finish(self) -> RequestOutput:
        """Waits for the end; returns the whole output. Raises the error that ended the request."""
        while not self.assembler.finished:
            await self._wait()
        return self.assembler.output()

    async def _wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            self._client.check()
            raise_failure(self._failure)

    def close(self) -> None:
        """Aborts the sequences that are still open."""
        for resend in self._resends:
            resend.cancel()
        if self.records:
            self._client.abort(list(self.records))


def raise_failure(delta: Delta) -> None:
    """Raises the error of a delta, if it has one."""
    if delta.error is None:
        return
    if delta.asleep:
        raise EngineAsleep(delta.error)
    if delta.refused:
        raise QueueFull(delta.error, RETRY_AFTER)
    if delta.error_param is not None:
        raise InvalidRequest(delta.error, delta.error_param)
    raise RequestFailed(delta.error)
