"""One request of a gateway: an ASGI application's scope, `receive` and `send`, and the ways of one that has been picked for."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from starlette.types import Message, Scope
from starling_agent.http.open_requests import ClientGone

from starling_router.epp import messages
from starling_router.upstream import RawHeaders

EXTENSION = "starling.ext_proc"
"""Key of the stream in the extensions of its scope."""


class WrongMessage(Exception):
    """A gateway sent what it must not, or not now."""


@dataclass(frozen=True, slots=True)
class GatewayAnswer:
    """An answer that has begun: its status, its public headers, and the endpoint whose it is, where the gateway says so."""

    status: int
    headers: RawHeaders
    served: str | None


class ExtProcStream:
    """Belongs to one call of the gateway. Raises ClientGone where the gateway has ended it, but for `receive`, which says so."""

    def __init__(self, context: "grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]") -> None:
        self._context = context
        self._headers: RawHeaders = []
        self._has_body = self._has_trailers = False
        self._status = 0
        self._error_headers: RawHeaders = []
        self._routed = False
        self.answer_ended = False
        """True once all of the answer has passed."""
        self.subset: frozenset[str] | None = None
        """Endpoints of which one has to be picked; None: any."""

    async def begin(self) -> Scope:
        """Returns the scope of the request. Raises WrongMessage where the gateway is set up otherwise than it has to be."""
        message = await self._read("request_headers")
        if (wrong := messages.wrong_modes(message)) is not None:
            raise WrongMessage(wrong)
        headers = messages.raw_headers(message.request_headers)
        self.subset = messages.subset_of(message)
        self._has_body = not message.request_headers.end_of_stream
        own = {name: value for name, value in headers if name.startswith(b":")}
        self._headers = [(name, value) for name, value in headers if name not in own]
        path, _, query = own.get(b":path", b"/").partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": own.get(b":method", b"GET").decode("latin-1"),
            "scheme": own.get(b":scheme", b"http").decode("latin-1"),
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [*self._headers, (b"host", own.get(b":authority", b""))],
            "client": None,
            "server": None,
            "state": {},
            "extensions": {EXTENSION: self},
        }

    async def receive(self) -> Message:
        """Returns a piece of the request's body, until it has come whole."""
        if not self._has_body:
            return {"type": "http.request", "body": b"", "more_body": False}
        try:
            message = await self._read("request_body", "request_trailers")
        except ClientGone:
            return {"type": "http.disconnect"}
        self._has_trailers = message.HasField("request_trailers")
        piece = message.request_body
        return {"type": "http.request", "body": piece.body, "more_body": not (self._has_trailers or piece.end_of_stream)}

    async def send(self, message: Message) -> None:
        """Answers in place of an endpoint. Does nothing for a request that has been routed: its answer is the endpoint's."""
        if self._routed:
            return
        if message["type"] == "http.response.start":
            self._status, self._error_headers = message["status"], message["headers"]
        else:
            with contextlib.suppress(ClientGone):
                await self._write(messages.refused(self._status, self._error_headers, message.get("body", b"")))

    async def route(self, endpoints: list[str], body: bytes, more: Mapping[bytes, bytes]) -> None:
        """Sends the request, whose body has been received, with `more` headers to the first of the endpoints that serves it."""
        self._routed = True
        await self._write(messages.routed(self._headers, endpoints, more))
        if self._has_body:
            for response in messages.request_body(body, has_trailers=self._has_trailers):
                await self._write(response)

    async def answer(self, more: Callable[[GatewayAnswer], RawHeaders]) -> GatewayAnswer:
        """Waits for an endpoint's answer, and lets its headers pass, with what `more` says of it beside them."""
        message = await self._read("response_headers", "request_body", "request_trailers")
        while not message.HasField("response_headers"):  # Envoy may send the end of a body twice (envoyproxy/envoy#46237)
            message = await self._read("response_headers", "request_body", "request_trailers")
        headers = messages.raw_headers(message.response_headers)
        self.answer_ended = message.response_headers.end_of_stream
        status = next((int(value) for name, value in headers if name == b":status"), 0)
        answer = GatewayAnswer(status, headers, messages.served_by(message, headers))
        await self._write(messages.answered(headers, more(answer)))
        return answer

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the answer's body, each piece before it is let pass: what it costs is known before the client has it.

        Ends early where the gateway shows no bodies.
        """
        while not self.answer_ended:
            try:
                message = await self._read("response_body", "response_trailers")
            except ClientGone:
                return
            self.answer_ended = message.HasField("response_trailers") or message.response_body.end_of_stream
            yield message.response_body.body
            for response in messages.response_piece(message):
                await self._write(response)

    async def _write(self, response: ProcessingResponse) -> None:
        try:
            await self._context.write(response)
        except (grpc.aio.UsageError, grpc.aio.InternalError):  # the call has ended
            raise ClientGone from None

    async def _read(self, *expected: str) -> ProcessingRequest:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise ClientGone
        if (kind := message.WhichOneof("request")) not in expected:
            raise WrongMessage(f"{kind or 'nothing'} came where {' or '.join(expected)} was expected")
        return message
