"""Sends a request to a backend and gives its answer back."""

import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakSet

import aiohttp
from aiohttp.connector import Connection
from starlette.types import Scope
from starling_agent.http.errors import ApiError, invalid
from yarl import URL

RawHeaders = list[tuple[bytes, bytes]]
CONNECT_SECONDS = 2.0
"""A backend that takes no connection in this time counts as gone."""
PRIVATE = b"x-starling-"
"""Headers that routers and agents exchange begin so. A client's are taken out."""
_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split(),
)
"""Headers of one connection, RFC 9110, 7.6.1."""
_CONNECTION = b"connection"
_OF_REQUEST = _HOP | {b"host", b"content-length", b"expect", b"accept-encoding"}
_SKIPPED = ("Content-Type", "User-Agent", "Accept", "Accept-Encoding")
"""Headers that aiohttp would add: the client's go as they are."""
_OF_ANSWER = _HOP | {b"date", b"x-request-id"}


MOST_UNFINISHED = 64 << 20
"""Bytes of one stream that wait here for the end of their event, or for its note: no answer in text is as long."""
SILENT_SECONDS = 20
"""A peer whose machine is silent for so long is gone, and with it its connections."""


def is_stream(headers: RawHeaders) -> bool:
    """Says whether an answer with these headers is one of server-sent events."""
    return any(name == b"content-type" and b"event-stream" in value for name, value in headers)


def check_unfinished(part: bytes | bytearray) -> None:
    """Raises ApiError for the beginning of an event that is too long to wait for its end, which may never come."""
    if len(part) > MOST_UNFINISHED:
        why = f"the answer ended early: an event of the server's has not ended after {MOST_UNFINISHED >> 20} MiB"
        raise ApiError(502, why, kind="server_error", code="bad_answer")


class BackendUnreachable(Exception):
    """A backend took no connection, or ended it before its answer began. `had_it`: it may have had the request."""

    def __init__(self, why: str, *, had_it: bool = True) -> None:
        super().__init__(why)
        self.had_it = had_it


@dataclass(frozen=True, slots=True)
class BackendAnswer:
    """An answer whose header has come. `chunks` are of the body, and may raise BackendUnreachable."""

    status: int
    headers: RawHeaders
    chunks: AsyncIterator[bytes]

    @property
    def public_headers(self) -> RawHeaders:
        """Headers that are not for routers alone."""
        return [header for header in self.headers if not header[0].startswith(PRIVATE)]


class Upstream:
    """Connections to backends, which are kept and used again. Belongs to the event loop that it is made in."""

    def __init__(self) -> None:
        self._session = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=30, socket_factory=_watched_socket))
        self._new_connections = _session(aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket))

    async def close(self) -> None:
        await self._session.close()
        await self._new_connections.close()

    @asynccontextmanager
    async def send(self, method: str, url: str, headers: RawHeaders, body: bytes) -> AsyncIterator[BackendAnswer]:
        """Sends a request. Raises BackendUnreachable before the answer's header has come, ApiError for what cannot be sent.

        A backend may close a connection that was idle just when it is used again, and has not had the request then. So one that
        ends without a byte is no failure, unless a new one fails, too.
        """
        lost = False
        try:
            try:
                response = await _request(self._session, method, url, headers, body)
            except KeptConnectionEnded:
                lost = True
                response = await _request(self._new_connections, method, url, headers, body)
        except aiohttp.ClientConnectorError as error:  # its own text has the address twice
            raise BackendUnreachable(f"it takes no connection: {_cause(error)}", had_it=lost) from None
        except aiohttp.ConnectionTimeoutError:
            raise BackendUnreachable(f"it takes no connection: nothing in {CONNECT_SECONDS:.3g} s", had_it=lost) from None
        except (UnicodeDecodeError, aiohttp.InvalidURL) as error:
            raise invalid(f"the path or a header cannot be sent on: {error}") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BackendUnreachable(str(error) or type(error).__name__) from None
        except ValueError as error:  # aiohttp's, for bytes that no header may have
            raise invalid(f"a header cannot be sent on: {error}") from None
        async with response:
            came = [(name.lower(), value) for name, value in response.raw_headers]
            left_out = _OF_ANSWER | _named_by_connection(came)
            kept = [header for header in came if header[0] not in left_out]
            yield BackendAnswer(response.status, kept, _chunks(response))


def _cause(error: aiohttp.ClientConnectorError) -> str:
    """Returns what the system says. Errors of names and of TLS have numbers of their own."""
    if isinstance(error, aiohttp.ClientSSLError):
        return str(error)
    is_name = isinstance(error, aiohttp.ClientConnectorDNSError)
    return os.strerror(error.errno) if error.errno and not is_name else error.strerror or str(error)


class KeptConnectionEnded(aiohttp.ServerDisconnectedError):
    """A connection that was used before has ended without an answer."""


class _Response(aiohttp.ClientResponse):
    """Knows whether its connection was used before. aiohttp's traces say so, too, and cost 0.1 ms a request."""

    _used: ClassVar[WeakSet[Any]] = WeakSet()

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        is_kept = connection.protocol in self._used
        self._used.add(connection.protocol)
        try:
            return await super().start(connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if is_kept:
                raise KeptConnectionEnded(str(error)) from None
            raise


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        response_class=_Response,
        # Clients share the connections, and no cookies.
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        auto_decompress=False,
    )


async def _request(
    session: aiohttp.ClientSession, method: str, url: str, headers: RawHeaders, body: bytes
) -> aiohttp.ClientResponse:
    return await session.request(
        method,
        URL(url, encoded=True),
        headers=[(name.decode(), value.decode()) for name, value in headers],
        data=body or None,
        allow_redirects=False,
        skip_auto_headers=_SKIPPED,
    )


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except aiohttp.ClientPayloadError:  # its text is of a parser's
        raise BackendUnreachable("its connection ended before its answer") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BackendUnreachable(str(error) or type(error).__name__) from None


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Makes a socket that notices a machine that vanished: otherwise a stream would wait for it for hours."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", SILENT_SECONDS // 2), ("TCP_KEEPINTVL", SILENT_SECONDS // 10), ("TCP_KEEPCNT", 5)):
        if hasattr(socket, name):  # as Linux names them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)
    return made


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    """Returns the names of headers that are of one connection, because its header `Connection` names them."""
    return {option.strip().lower() for name, value in headers if name == _CONNECTION for option in value.split(b",")}


def forwarded_headers(scope: Scope, more: Mapping[bytes, bytes]) -> RawHeaders:
    """Returns a client's headers for a backend, without those of its connection and those that are a router's to set."""
    left_out = _OF_REQUEST | more.keys() | _named_by_connection(scope["headers"])
    kept = [(name, value) for name, value in scope["headers"] if name not in left_out and not name.startswith(PRIVATE)]
    client = scope.get("client")
    if client is not None:
        kept.append((b"x-forwarded-for", client[0].encode()))
    return [*kept, *more.items()]
