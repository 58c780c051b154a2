"""Responses that are made in the background: no client needs to wait for one, and any may follow or cancel it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import structlog
from starlette.types import Message
from starling_engine.errors import StarlingError

from starling_agent.http.errors import ApiError, as_api_error
from starling_agent.http.open_requests import ClientGone, OpenRequests
from starling_agent.openai.generation import TAKEN_SECONDS
from starling_agent.openai.responses.background_response import BackgroundResponse, split_events, without_events
from starling_agent.openai.responses.folder_store import FolderStore
from starling_agent.openai.responses.memory_store import MemoryStore
from starling_agent.openai.responses.store import ResponseStore, StoredResponse, StoreLimits, store_failures
from starling_agent.settings import ServerSettings

if TYPE_CHECKING:
    from starling_agent.openai.responses.run import ResponseRun

KEEP_SECONDS = 1.0
CANCEL_SECONDS = 5.0
"""Time that another pod has to cancel a response before the answer is what is known of it."""
CANCEL_LOOK_SECONDS = 0.2
STORE_SECONDS = 60.0
"""Time in which a response that has ended is stored, when the disk is full at first."""
END_SECONDS = 5.0
"""Time after the drain in which responses are stored as they ended."""
log = structlog.get_logger("starling.responses")


class BackgroundResponses:
    """All that this pod makes in the background, and what is stored of others. They outlive connections, and the engine's end."""

    def __init__(self, store: ResponseStore, open_requests: OpenRequests) -> None:
        self.store = store
        self._open_requests = open_requests
        self._made: dict[str, BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, run: "ResponseRun", *, has_events: bool) -> BackgroundResponse:
        """Begins to make a response. Raises what the engine refuses it with, or ApiError 503 where it cannot be stored."""
        made = BackgroundResponse(run, self.store.takes, has_events=has_events)
        made.add(run.writer.queue())
        with store_failures():
            await self.store.put(made.id, made.stored())
        self._made[made.id] = made
        task = asyncio.create_task(self._make(made))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(TimeoutError):
            await asyncio.wait_for(made.taken.wait(), TAKEN_SECONDS)
        made.taken.set()
        if made.refusal is not None:
            with suppress(ApiError, OSError):
                await self.store.delete(made.id, run.owner)
            raise made.refusal
        return made

    async def get(self, response_id: str, owner: str | None) -> StoredResponse:
        """Returns a response as far as it is made. Raises ApiError: 404, and 503 where the store fails."""
        if (made := self._made_by(response_id, owner)) is not None:
            return made.stored()
        with store_failures():
            return await self.store.get(response_id, owner)

    async def events(self, response_id: str, owner: str | None, after: int) -> AsyncGenerator[bytes]:
        """Returns the events behind the one of this number. Raises ApiError, or InvalidRequest where none are kept."""
        if (made := self._made_by(response_id, owner)) is not None:
            return made.events(after)
        stored = await self.get(response_id, owner)
        if stored.background and stored.is_running:
            raise ApiError(409, "another pod makes this response; its events are here when it has ended", code="made_elsewhere")
        if stored.events is None:
            raise without_events()
        return _all_of(split_events(stored.events)[after + 1 :])

    async def cancel(self, response_id: str, owner: str | None) -> StoredResponse:
        """Cancels a response unless it has ended; returns it. Raises ApiError: 400 for one that is not in the background."""
        stored = await self.get(response_id, owner)
        if not stored.background:
            message = "only responses in the background can be cancelled, and this one is not"
            raise ApiError(400, message, code="not_in_background")
        if (made := self._made_by(response_id, owner)) is not None:
            made.cancelled.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(made.ended.wait(), CANCEL_SECONDS)
            return made.stored()
        if not stored.is_running:
            return stored
        over = time.monotonic() + CANCEL_SECONDS
        with store_failures():
            await self.store.ask_to_cancel(response_id)
            while stored.is_running and time.monotonic() < over:
                await asyncio.sleep(CANCEL_LOOK_SECONDS)
                stored = await self.store.get(response_id, owner)
        return stored

    async def delete(self, response_id: str, owner: str | None) -> None:
        """Forgets a response, and cancels it if it runs. Raises ApiError: 404, and 503 where the store fails."""
        with store_failures():
            await self.store.delete(response_id, owner)
        if (made := self._made.pop(response_id, None)) is not None:
            made.cancelled.set()

    async def finish(self, drain_over: asyncio.Event) -> None:
        """Waits until all have ended and are stored, or END_SECONDS behind the drain, as a disk may hang.

        Where nobody could read them after this process, they are cancelled.
        """
        if self._tasks and not self.store.is_shared:
            log.warning("responses in the background end with the server", open=len(self._tasks))
            for made in self._made.values():
                made.cancelled.set()
        over = asyncio.create_task(drain_over.wait())
        while self._tasks and not over.done():
            await asyncio.wait((*self._tasks, over), return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if self._tasks and (await asyncio.wait(self._tasks, timeout=END_SECONDS))[1]:
            log.error("responses in the background were not stored", open=len(self._tasks))

    def _made_by(self, response_id: str, owner: str | None) -> BackgroundResponse | None:
        made = self._made.get(response_id)
        return made if made is not None and made.run.owner == owner else None

    # ---- the making ----

    async def _make(self, made: BackgroundResponse) -> None:
        """Makes all of a response, and stores how it ended."""
        writer, last = made.run.writer, b""
        try:
            # It is open as any request is, and its cancellation is what for others is the client's end.
            await self._open_requests.run(lambda: self._cancellation(made), self._write(made))
        except ClientGone:
            last = made.run.cancel()
        except Exception as error:  # nobody awaits the task: the response itself tells
            if not isinstance(error, StarlingError):
                log.exception("a response in the background failed", id=made.id)
            if not made.taken.is_set():
                made.refusal = error
            last = writer.fail(as_api_error(error))
        made.taken.set()
        made.ended.set()
        made.add(last)
        if made.refusal is None:
            await self._store_end(made)
        self._made.pop(made.id, None)

    async def _write(self, made: BackgroundResponse) -> None:
        is_stored = False
        async with aclosing(made.run.chunks()) as chunks:
            async for events in chunks:
                made.add(events)
                made.taken.set()
                if not is_stored:
                    is_stored = True
                    await self._update(made)

    async def _cancellation(self, made: BackgroundResponse) -> Message:
        """Returns, as the message of a client's end, when the response is cancelled here or by another pod, or was deleted."""
        while not made.cancelled.is_set() and not await self.store.keep(made.id):
            with suppress(TimeoutError):
                await asyncio.wait_for(made.cancelled.wait(), KEEP_SECONDS)
        return {"type": "http.disconnect"}

    async def _store_end(self, made: BackgroundResponse) -> None:
        """Stores a response that has ended. Until that works it is in memory, for STORE_SECONDS."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_SECONDS):
                while not await self._update(made):  # noqa: ASYNC110 - a disk has no events
                    await asyncio.sleep(KEEP_SECONDS)

    async def _update(self, made: BackgroundResponse) -> bool:
        """Says if it is stored."""
        try:
            await self.store.update(made.id, made.stored())
        except OSError as error:
            log.error("a response cannot be stored", id=made.id, cause=str(error))
            return False
        return True


def background_responses(settings: ServerSettings, open_requests: OpenRequests) -> BackgroundResponses:
    """Makes the responses of a server, with the store that its settings say. Raises ConfigError."""
    limits = StoreLimits(settings.max_stored_bytes, settings.stored_response_seconds)
    folder = settings.response_store
    store = MemoryStore(limits, settings.pod) if folder is None else FolderStore(folder, limits, settings.pod)
    return BackgroundResponses(store, open_requests)


async def _all_of(events: list[bytes]) -> AsyncGenerator[bytes]:
    yield b"".join(events)
