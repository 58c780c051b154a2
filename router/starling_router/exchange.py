"""One answer to a client: begun once, and ended in words where its backend went away in the middle."""

from collections.abc import Callable

import msgspec
from starlette.types import Scope, Send
from starling_agent.http.error_forms import body_as_event, error_event, send_error
from starling_agent.http.errors import ApiError

from starling_router.upstream import BackendAnswer, RawHeaders, check_unfinished, is_stream

WAITING = b": waiting\n\n"
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class AnswerCut(Exception):
    """An answer that is no stream could not be finished; its connection has to end, so that the client sees that."""


class Exchange:
    """`begun` says whether a backend's answer has begun. The client of one that waits may have a status, 200, before."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._streams = False
        self._waited = False
        self._kept: bytearray | None = None
        """The beginning of an answer that can only be told as an event, at its end."""
        self._is_error = False
        self._part = bytearray()
        """The beginning of an event that has not come whole."""
        self.begun = False
        self.on_events: Callable[[bytes], None] = lambda _: None
        """Is called with each piece of a backend's answer."""

    async def say_waiting(self) -> None:
        """Begins a stream before its backend is known, or goes on with it, so that its connection is kept."""
        if not self._streams:
            self._waited = self._streams = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM})
        await self._send_piece(WAITING)

    async def begin(self, answer: BackendAnswer, more: RawHeaders) -> None:
        """Begins the answer, unless another backend has begun it."""
        if self.begun:
            return
        self.begun = True
        streams = is_stream(answer.headers)
        if not self._waited:
            self._streams = streams
            await self._send({"type": "http.response.start", "status": answer.status, "headers": [*answer.public_headers, *more]})
        elif answer.status != 200 or not streams:
            self._kept, self._is_error = bytearray(), answer.status != 200

    async def write(self, chunk: bytes) -> None:
        """Writes a chunk. Raises ApiError where an answer that can only be told as an event is too long."""
        self.on_events(chunk)
        if self._kept is None:
            await self._send_piece(chunk)
        else:
            self._kept += chunk
            check_unfinished(self._kept)

    async def write_events(self, chunk: bytes) -> None:
        """Writes a chunk; of a stream whole events alone, so that an error may follow them.

        Raises ApiError where one is too long.
        """
        if not self._streams:
            await self.write(chunk)
            return
        searched = max(0, len(self._part) - 1)
        self._part += chunk
        end = self._part.rfind(b"\n\n", searched) + 2
        if end > 1:
            events = bytes(self._part[:end])
            del self._part[:end]
            await self.write(events)
        check_unfinished(self._part)

    async def end(self, last: bytes = b"") -> None:
        last, self._part = bytes(self._part) + last, bytearray()
        self.on_events(last)
        await self._send_last(last if self._kept is None else self._as_event(bytes(self._kept) + last))

    async def fail(self, error: ApiError) -> None:
        """Ends the answer with an error: its status, or an event of a stream that has begun. Raises AnswerCut for others."""
        if self._streams:
            await self._send_last(error_event(error, self._scope))
        elif not self.begun:
            await send_error(self._scope, self._send, error)
        else:
            raise AnswerCut(str(error))

    def _as_event(self, body: bytes) -> bytes:
        try:
            line = msgspec.json.encode(msgspec.json.decode(body))
        except msgspec.DecodeError:
            why = "a server answered, but neither with a stream nor with JSON"
            return error_event(ApiError(502, why, kind="server_error", code="bad_answer"), self._scope)
        return body_as_event(line, self._scope) if self._is_error else b"data: " + line + b"\n\n"

    async def _send_piece(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _send_last(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})
