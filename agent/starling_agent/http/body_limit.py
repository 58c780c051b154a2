"""Limits of a request's body: its size, and the time until it has arrived."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError

MIN_BYTES_PER_SECOND = 1024
"""The lowest rate at which a body may arrive after `read_seconds`, so that a large one on a slow line has time."""


class BodyLimit:
    """Answers 413 to a body over `max_bytes`: at once by its Content-Length, otherwise when it exceeds the limit.

    Answers 408 to a body that is not complete after `read_seconds`, and one second more for each KiB. A client that sends byte by
    byte would otherwise hold its connection, and delay the end of a server that drains.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, read_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._read_seconds = read_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _content_length(scope)
        if length is not None and length > self._max_bytes:
            await send_error(scope, send, self._too_large())
            return
        await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        body = _Body(asyncio.get_running_loop().time)

        async def limited() -> Message:
            message = await self._in_time(receive, body)
            body.add(message)
            if body.size > self._max_bytes:
                raise self._too_large()
            return message

        return limited

    async def _in_time(self, receive: Receive, body: "_Body") -> Message:
        if body.whole:
            # The next message is the client's disconnect, which has no limit of time.
            return await receive()
        try:
            async with asyncio.timeout_at(body.deadline(self._read_seconds)):
                return await receive()
        except TimeoutError:
            raise _too_slow(body.size, self._read_seconds) from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


class _Body:
    """Bytes of a body, and the time since its first read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.size = 0
        self.whole = False
        self._clock = clock
        self._began: float | None = None

    def add(self, message: Message) -> None:
        self.size += len(message.get("body", b""))
        self.whole = not message.get("more_body", False)

    def deadline(self, read_seconds: float) -> float:
        if self._began is None:
            self._began = self._clock()
        return self._began + read_seconds + self.size / MIN_BYTES_PER_SECOND


def _too_slow(size: int, read_seconds: float) -> ApiError:
    has = f"it has {read_seconds:g} s and one more for each {MIN_BYTES_PER_SECOND} bytes"
    return ApiError(408, f"the body came too slowly, {size} bytes so far: {has}", code="request_timeout")


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
