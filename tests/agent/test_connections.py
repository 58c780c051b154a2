"""Clients that send slowly, too much or incomplete requests, seen from their sockets: each gets an answer and a close."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starling_agent.api_keys import ApiKeys
from starling_agent.drain import Drain
from starling_agent.http import body_limit
from starling_agent.http.errors import ApiError
from starling_agent.http.middleware_stack import middleware_stack
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.server.http_server import HttpServer, bind
from starling_agent.settings import MIB, ServerSettings

from tests.waiting import until

READ_SECONDS = 0.15
KEEP_ALIVE_SECONDS = 1.0
UNREAD_SECONDS = 0.3
METRICS = RequestMetrics()
pytestmark = pytest.mark.asyncio(loop_scope="module")
HEAD = b"POST /size HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
KEY = b"Authorization: Bearer key\r\n"
SEEN = HEAD.replace(b"/size", b"/seen") + KEY


async def size(request: Request) -> JSONResponse:
    return JSONResponse({"size": len(await request.body())})


async def seen(request: Request) -> JSONResponse:
    body = await request.body()
    return JSONResponse({"headers": [[name.decode(), value.decode()] for name, value in request.headers.raw], "size": len(body)})


async def slow(_: Request) -> JSONResponse:
    await asyncio.sleep(KEEP_ALIVE_SECONDS + 0.2)
    return JSONResponse({"slow": True})


ENDED = asyncio.Event()


async def endless(_: Request) -> StreamingResponse:
    async def chunks() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * MIB
                await asyncio.sleep(0)
        finally:
            ENDED.set()

    return StreamingResponse(chunks())


async def answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[HttpServer]:
    """A server with the endpoint's middleware and a route that reads its body."""
    settings = ServerSettings(read_seconds=READ_SECONDS, api_keys=ApiKeys(["key"]))
    app = Starlette(
        routes=[
            Route("/size", size, methods=["POST"]),
            Route("/seen", seen, methods=["POST"]),
            Route("/endless", endless),
            Route("/slow", slow),
        ],
        middleware=middleware_stack(settings, Drain(), METRICS.responses),
        exception_handlers={ApiError: answer_error},
    )
    server = HttpServer(app, read_seconds=READ_SECONDS, responses=METRICS.responses)
    listener = bind("127.0.0.1", 0, UNREAD_SECONDS)
    server.config.timeout_keep_alive = KEEP_ALIVE_SECONDS  # type: ignore[assignment]
    listener.listen()
    task = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: _is_started(server), "the server")
        yield server
    finally:
        server.should_exit = True
        await task


async def _is_started(server: HttpServer) -> bool:
    return server.started


@contextlib.asynccontextmanager
async def connected(server: HttpServer) -> "AsyncIterator[Client]":
    client = Client(*await asyncio.open_connection(*server.servers[0].sockets[0].getsockname()))
    try:
        yield client
    finally:
        client.writer.close()
        with contextlib.suppress(ConnectionError):
            await client.writer.wait_closed()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def send_slowly(self, seconds: float = 0.05) -> None:
        """Sends a byte at a time until the server closes the connection."""
        with contextlib.suppress(ConnectionError):
            while not self.writer.is_closing() and not self.reader.at_eof():
                self.send(b"x")
                await asyncio.sleep(seconds)

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return int(status.split()[1]), headers, json.loads(await self.reader.readexactly(int(headers["content-length"])))

    async def refusal(self) -> tuple[int, str]:
        """Returns status and code of an error."""
        status, _, body = await self.answer()
        return status, body["error"]["code"]

    async def expect_close(self) -> None:
        """Checks that the connection is closed without more data. A client that still sends sees a reset."""
        with contextlib.suppress(ConnectionError):
            assert await self.reader.read() == b""


@pytest_asyncio.fixture(loop_scope="module")
async def client(server: HttpServer) -> AsyncIterator[Client]:
    async with connected(server) as client:
        yield client


@pytest.mark.parametrize("part", [b"P", HEAD, HEAD + b"X-Long: "])
async def test_an_incomplete_header_gets_408_in_time(client, part):
    client.send(part)
    assert await client.refusal() == (408, "request_timeout")
    await client.expect_close()


async def test_a_header_that_comes_byte_by_byte_gets_no_more_time(client):
    client.send(HEAD, b"X-Long: ")
    sending = asyncio.create_task(client.send_slowly())
    assert await client.refusal() == (408, "request_timeout")
    await client.expect_close()
    await sending


async def test_an_incomplete_header_after_a_request_gets_408_too(client):
    client.send(HEAD, KEY, b"Content-Length: 2\r\n\r\n{}", HEAD)
    assert (await client.answer())[0] == 200
    assert await client.refusal() == (408, "request_timeout")
    await client.expect_close()


@pytest.mark.parametrize("length", [b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n12"])
async def test_an_incomplete_body_gets_408_in_time(client, length):
    client.send(HEAD, KEY, length)
    assert await client.refusal() == (408, "request_timeout")
    await client.expect_close()


async def test_a_body_that_comes_byte_by_byte_gets_408(client):
    client.send(HEAD, KEY, b"Content-Length: 100000\r\n\r\n")
    sending = asyncio.create_task(client.send_slowly())
    assert await client.refusal() == (408, "request_timeout")
    await client.expect_close()
    await sending


async def test_a_slow_body_at_the_least_rate_arrives(client, monkeypatch):
    monkeypatch.setattr(body_limit, "MIN_BYTES_PER_SECOND", 50)
    began = time.monotonic()
    client.send(HEAD, KEY, b"Content-Length: 5000\r\n\r\n")
    for _ in range(10):
        client.send(b"x" * 500)
        await asyncio.sleep(0.05)
    assert (await client.answer())[::2] == (200, {"size": 5000})
    assert time.monotonic() - began > 3 * READ_SECONDS


async def test_the_unread_body_of_a_refused_request_does_not_keep_the_connection_open(client):
    client.send(HEAD, b"Content-Length: 100000\r\n\r\n")
    sending = asyncio.create_task(client.send_slowly())
    assert (await client.answer())[0] == 401
    await client.expect_close()
    await sending


@pytest.mark.parametrize("is_refused", [True, False])
async def test_a_request_right_behind_another_one_has_all_the_time_that_it_takes(client, is_refused):
    """No timer that an answer before has set ends it, not even the first of two: h11 would break the connection.

    Clients send the request again without a word, as Schemathesis does, and only the log of the server has the error.
    """
    head = HEAD + (b"" if is_refused else KEY) + b"Content-Length: 2\r\n\r\n"
    client.send(head)
    if is_refused:
        assert (await client.answer())[0] == 401
        client.send(b"{}", head)
        assert (await client.answer())[0] == 401
    client.send(b"{}GET /slow HTTP/1.1\r\nHost: here\r\n", KEY, b"\r\n")
    if not is_refused:
        assert (await client.answer())[0] == 200
    async with asyncio.timeout(10):
        assert (await client.answer())[::2] == (200, {"slow": True})


async def test_a_client_that_sends_nothing_is_closed_as_an_idle_one(client):
    await client.expect_close()


async def test_an_idle_connection_outlives_the_time_for_a_request(server, monkeypatch):
    monkeypatch.setattr(server.config, "timeout_keep_alive", 60.0)
    async with connected(server) as client:
        for _ in range(2):
            client.send(HEAD, KEY, b"Content-Length: 2\r\n\r\n{}")
            assert (await client.answer())[0] == 200
            await asyncio.sleep(2 * READ_SECONDS)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"X-A: %s\r\n" % (b"a" * 16_000), 200),
        (b"X-A: %s\r\n" % (b"a" * 64_000), 431),
        (b"X-A: a\r\n" * 90, 200),
        (b"X-A: a\r\n" * 10_000, 431),
        (b"X-A: %s\r\n" % (b"a" * 8_000_000), 431),
        (b"X-A: %s\r\n" % (b"a" * 30_000) * 300, 431),
    ],
    ids=["16 KB", "64 KB", "90 fields", "10,000 fields", "8 MB in one", "8 MB in 300"],
)
async def test_a_header_over_the_limit_gets_431(client, fields, status):
    client.send(HEAD, KEY, fields, b"Content-Length: 2\r\n\r\n{}")
    answered, _, body = await client.answer()
    assert answered == status
    assert status == 200 or body["error"]["code"] == "header_too_large"
    if len(fields) > MIB:
        await client.expect_close()


async def test_a_long_path_counts_as_header(client):
    client.send(b"GET /%s HTTP/1.1\r\nHost: here\r\n\r\n" % (b"a" * 40_000))
    assert await client.refusal() == (431, "header_too_large")


@pytest.mark.parametrize(
    "bad",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nHost here\r\n\r\n",
        b"BREW /size HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: here\r\nHost: there\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET http://here/ HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET /seen#x HTTP/1.1\r\nHost: here\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: here\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: here\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT here:80 HTTP/1.1\r\nHost: here\r\n\r\n",
    ],
)
async def test_data_that_is_not_http_gets_400(client, bad):
    client.send(bad)
    assert await client.refusal() == (400, "invalid_http")
    await client.expect_close()


async def test_a_body_that_is_not_http_gets_400(client):
    client.send(HEAD, KEY, b"Transfer-Encoding: chunked\r\n\r\nno length\r\n")
    assert await client.refusal() == (400, "invalid_http")
    await client.expect_close()


async def test_what_is_wrong_with_a_request_is_said(client):
    client.send(b"GET http://here/ HTTP/1.1\r\nHost: here\r\n\r\n")
    assert "its target has to be a path" in (await client.answer())[2]["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: -2\r\n",
        b"Content-Length : 2\r\n",
    ],
)
async def test_a_body_of_which_two_readers_could_see_another_length_gets_400(client, fields):
    """RFC 9112, 6.3 and 11.2: a proxy before the server could take a part of it for a request of its own."""
    client.send(HEAD, KEY, fields, b"\r\n2\r\n{}\r\n0\r\n\r\n")
    assert await client.refusal() == (400, "invalid_http")
    await client.expect_close()


async def test_fields_behind_a_body_are_no_headers(client):
    """Neither before the body is read, nor afterwards, when what was checked is used."""
    client.send(SEEN, b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Late: yes\r\n\r\n")
    status, _, body = await client.answer()
    assert (status, body["size"]) == (200, 2)
    assert "x-late" not in dict(body["headers"])


@pytest.mark.parametrize("behind", [b"0\r\nX-Late: ", b"2;x="], ids=["a field", "an extension of a chunk"])
async def test_what_comes_behind_a_body_is_no_longer_than_a_header(client, behind):
    client.send(SEEN, b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", behind, b"a" * 8_000_000)
    assert await client.refusal() == (431, "header_too_large")
    await client.expect_close()


async def test_a_value_has_no_space_around_it(client):
    client.send(SEEN, b"X-Padded: \t a b \t \r\nContent-Length: 0\r\n\r\n")
    assert dict((await client.answer())[2]["headers"])["x-padded"] == "a b"


async def test_a_whole_request_is_answered_though_garbage_follows(client):
    client.send(b"GET /slow HTTP/1.1\r\nHost: here\r\n", KEY, b"\r\n\x16\x03\x01\x02\x00")
    status, headers, body = await client.answer()
    assert (status, headers["connection"], body) == (200, "close", {"slow": True})
    await client.expect_close()


async def test_a_header_that_begins_behind_a_request_waits_for_its_answer(client):
    """The time of a header begins with the answer before it, which takes longer than that."""
    client.send(b"GET /slow HTTP/1.1\r\nHost: here\r\n", KEY, b"\r\n", HEAD)
    assert (await client.answer())[::2] == (200, {"slow": True})
    client.send(KEY, b"Content-Length: 2\r\n\r\n{}")
    assert (await client.answer())[::2] == (200, {"size": 2})


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_a_client_that_offers_another_protocol_gets_its_answer(client, pieces):
    """Java's HttpClient offers HTTP/2 so with each first request, and curl with --http2."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    whole = [HEAD + KEY + offer + b"Content-Length: 10\r\n\r\n", b"12345", b"67890"]
    for piece in (b"".join(whole[:1]), b"".join(whole[1:])) if pieces == 2 else whole if pieces == 3 else [b"".join(whole)]:
        client.send(piece)
        await asyncio.sleep(0.02)
    assert (await client.answer())[::2] == (200, {"size": 10})
    client.send(whole[0], whole[1], whole[2])
    assert (await client.answer())[::2] == (200, {"size": 10})


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no such setting")
async def test_a_client_that_reads_nothing_loses_its_stream(client):
    client.writer.transport.pause_reading()
    client.send(b"GET /endless HTTP/1.1\r\nHost: here\r\n", KEY, b"\r\n")
    async with asyncio.timeout(60):
        await ENDED.wait()


async def test_refusals_that_reach_no_application_are_counted(client):
    before = METRICS.responses["none", 400]
    client.send(b"\x16\x03\x01\x02\x00")
    assert (await client.answer())[0] == 400
    assert METRICS.responses["none", 400] == before + 1
