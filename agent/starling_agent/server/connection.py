"""One client's connection: limits of its header, an answer to every refusal, and an end to old connections."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from starling_agent.http.auth import is_of_router
from starling_agent.http.errors import ApiError
from starling_agent.http.header_limit import MAX_HEADER_BYTES, header_too_large

LINGER_SECONDS = 2.0
"""A reset would hide the answer from a client that still sends; what it sends in this time is read and dropped."""
AGAIN_SECONDS = 6.0
"""A client that had an answer may send its next request on the same connection so much later. httpx, and so the `openai` client,
takes none that was idle for 5 s; between that look and the request a busy machine lets a second go by. Who keeps connections for
longer (Go's client 90 s) has to repeat what is lost so."""
ROUTER_AGAIN_SECONDS = 0.5
"""The same for a router, which sends again what it lost on a connection that was kept, and for others that show its token."""
log = structlog.get_logger("starling.http")


class ClientConnection(HttpToolsProtocol):
    """uvicorn's connection with more timers; it has only one, for idle clients that have had an answer.

    A new client that sends nothing is treated as an idle one. A header has `read_seconds` from its first byte, then gets 408.
    If a request is answered before its body has come, the rest is read and dropped for as long, and then the connection is closed.

    An old connection is closed with its next answer: a balancer of connections then sends its client to new servers too. Old is a
    random age from half to all of `connection_seconds`, so that clients that came together do not come back together; 0: never.

    When the server shuts down, a client that may just send a request gets an answer to that one, too, where the server still
    `awaits_requests`: a new client and one whose header has begun within `read_seconds`, for on a busy machine a request may come
    long after its connection; and one that had an answer less than `AGAIN_SECONDS` ago.

    What is wrong behind a whole request ends the connection with that request's answer. Refusals that reach no application are
    counted in `responses`, with the route "none".

    Of uvicorn's two parsers httptools takes a third less of the processor for the events of a stream than h11 does.
    """

    def __init__(
        self,
        *args: Any,
        read_seconds: float,
        connection_seconds: float,
        responses: "Counter[tuple[str, int]]",
        awaits_requests: Callable[[], bool],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._read_seconds = read_seconds
        age = random.uniform(0.5, 1.0) * connection_seconds or math.inf
        self._old_at = self.loop.time() + age
        self._idle_since = self.loop.time()
        self._shutdown_timer: asyncio.TimerHandle | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._in_header = self._in_message = False
        """The state of the parser: a header has begun and not ended, or a whole request has."""
        self._unread_bytes = 0
        """Bytes of pieces behind the one that began a request or had the last of its body: a header, or fields behind a body."""
        self._refused = False
        self._responses = responses
        self._awaits_requests = awaits_requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_header_timer()
        if self._shutdown_timer is not None:
            self._shutdown_timer.cancel()

    def data_received(self, data: bytes) -> None:
        # After a refusal, further data is read and dropped: if the connection closed at once, the client would see only a reset.
        if self._refused:
            return
        self._unread_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._is_answering():
            # A request that came in one piece with the end of the one before: the idle client's timer would break its answer.
            super()._unset_keepalive_if_required()
        if self._in_message and self._unread_bytes > MAX_HEADER_BYTES:
            self._refuse(header_too_large())
        self._watch_header()

    def on_message_begin(self) -> None:
        self._in_header = self._in_message = True
        self._unread_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header:  # what comes behind a body is no part of what was checked before it
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self.parser.get_http_version() == "1.1" and sum(name == b"host" for name, _ in self.headers) != 1:
            raise ValueError("it has to have one Host")
        if not self.url.startswith(b"/") or b"#" in self.url or not self.url.isascii():
            # Behind a backend's address, another target would name another host.
            raise ValueError("its target has to be a path in ASCII, without a fragment")
        super().on_headers_complete()
        self._in_header = False

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        # Only after the whole body: otherwise the client would see a reset and no answer.
        if self.loop.time() >= self._old_at:
            self.cycle.keep_alive = False
        super().on_message_complete()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_offer(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            why = error.__context__ or error  # what a check of ours says, or the parser
            self._refuse(ApiError(400, f"this is no valid HTTP request: {why}", code="invalid_http"))

    def _decline_offer(self, rest: bytes) -> None:
        """Reads a request again without its offer of another protocol: the parser takes its body for that.

        Java's HttpClient offers HTTP/2 so with its first request, and curl with --http2.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(ApiError(400, "this server is no proxy: CONNECT is not possible", code="invalid_http"))
            return
        fields = b"".join(b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self.url, version, fields, rest))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since = self.loop.time()
        self._watch_header()
        if self._has_unread_body() and self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(self._read_seconds, self.timeout_keep_alive_handler)

    def shutdown(self) -> None:
        if self._refused:
            self.transport.close()
        elif (seconds := self._seconds_to_wait()) > 0:
            self._old_at = 0.0
            self._shutdown_timer = self.loop.call_later(seconds, self._shut_down_later)
        else:
            super().shutdown()

    def _shut_down_later(self) -> None:
        if not self._refused and not self.transport.is_closing():
            self.shutdown()

    def _seconds_to_wait(self) -> float:
        """Returns for how long a request may still come, of a connection that has none."""
        if not self._awaits_requests() or self._is_answering():
            return 0.0
        if self._header_timer is not None:  # which ends first
            return self._read_seconds
        if self.cycle is None:
            wait = self._read_seconds
        else:
            wait = ROUTER_AGAIN_SECONDS if is_of_router(dict(self.cycle.scope)) else AGAIN_SECONDS
        return self._idle_since + wait - self.loop.time()

    def _unset_keepalive_if_required(self) -> None:
        if not self._has_unread_body():
            super()._unset_keepalive_if_required()

    def _has_unread_body(self) -> bool:
        """True while a request has its answer and its body has not arrived completely."""
        return self.cycle is not None and self.cycle.response_complete and self._in_message and not self._in_header

    def _is_answering(self) -> bool:
        """True while a request has no whole answer. `cycle` is that of the last one whose header has come."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_header(self) -> None:
        """Limits the time of a header that has begun. Behind a request that is being answered it may take as long as that."""
        if self._refused or not self._in_header or self._is_answering():
            self._stop_header_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self._read_seconds, self._on_late_header)

    def _on_late_header(self) -> None:
        self._refuse(ApiError(408, f"the header did not come within {self._read_seconds:g} s", code="request_timeout"))

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answers if that is still possible, and closes a moment later."""
        self._refused = True
        self._stop_header_timer()
        has_body = self._in_message and not self._in_header
        if self._is_answering() and not has_body:
            self.cycle.keep_alive = False
            return
        is_answered = has_body and (self.cycle.response_started or bool(self.pipeline))
        self._end_cycle()
        if self.transport.is_closing():
            return
        if is_answered:
            self.transport.close()
            return
        log.info("connection refused", status=error.status, cause=str(error), client=self.client[0] if self.client else None)
        self._responses["none", error.status] += 1
        self._write(error)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _end_cycle(self) -> None:
        """Wakes an application that waits for a body that cannot be read."""
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _write(self, error: ApiError) -> None:
        body = error.body()
        headers = {**error.headers, "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], fields.encode("latin-1"), body))
