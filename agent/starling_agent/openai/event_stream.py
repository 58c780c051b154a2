"""A response of server-sent events, which go to the socket as they are written."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starling_engine.errors import StarlingError

from starling_agent.http import error_forms
from starling_agent.http.errors import ApiError, as_api_error
from starling_agent.http.open_requests import ClientGone, OpenRequests

ERROR_EVENT_SECONDS = 1.0
"""Time to send an error event to a client that reads slowly."""

ErrorEvent = Callable[[ApiError], bytes]
log = structlog.get_logger("starling.stream")


def sse(name: str, fields: Mapping[str, object]) -> bytes:
    """Returns an event that has its name in its data, too."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


class EventStream(Response):
    """Sends `first`, which has been made already, and then all of `chunks`.

    Other than in Starlette's StreamingResponse, an error after the headers becomes an event, and a disconnect stops the engine.
    The event has the form of the request's API, unless `error_event` makes another one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        chunks: AsyncGenerator[bytes],
        open_requests: OpenRequests,
        headers: Mapping[str, str] | None = None,
        error_event: ErrorEvent | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._open_requests = open_requests
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error_event = self._error_event or partial(error_forms.error_event, scope=scope)
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._stream(receive, send, error_event)

    async def _stream(self, receive: Receive, send: Send, error_event: ErrorEvent) -> None:
        last = b""
        try:
            await self._open_requests.run(receive, self._pump(send), came=False)
        except ClientGone:
            return
        except StarlingError as error:
            last = error_event(as_api_error(error))
        except Exception as error:
            log.exception("stream failed")
            last = error_event(as_api_error(error))
        try:
            async with asyncio.timeout(ERROR_EVENT_SECONDS if last else None):
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            log.warning("client too slow for its error event")

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
