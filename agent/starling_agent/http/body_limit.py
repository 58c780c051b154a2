"""The largest request body."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starling_agent.http.refusing import discard_body, start_error
from starling_agent.openai.errors import ApiError

LINGER_SECONDS = 2.0
"""A client that is still sending would not see an answer that comes with a reset; its body is read away for so long."""


class BodyLimit:
    """Answers 413 to a body over `max_bytes`: by its Content-Length at once, otherwise as soon as it grows past."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = _content_length(scope)
        if length is not None and length > self._max_bytes:
            await self._refuse(receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        await start_error(send, self._error(), close=True)
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                await discard_body(receive)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._error()
            return message

        return counted

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
