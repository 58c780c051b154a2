"""A server shuts down while clients connect and send: nobody's request is lost, and who is idle is not waited for."""

import asyncio
import math
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message
from starling_agent.drain import Drain
from starling_agent.file_token import FileToken
from starling_agent.http.middleware_stack import middleware_stack
from starling_agent.http.open_requests import OpenRequests
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai.event_stream import EventStream
from starling_agent.server import connection
from starling_agent.server.http_server import BACKLOG, HttpServer, bind
from starling_agent.server.signals import SignalShutdown
from starling_agent.settings import ServerSettings

from tests.waiting import until

ASK = b"POST /work HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n"
PATIENCE = 60.0


@dataclass
class Server:
    """One that answers `ASK` when `may_answer`, in the test's own loop."""

    http: HttpServer
    address: tuple[str, int]
    shutdown: SignalShutdown
    open_requests: OpenRequests
    serving: "asyncio.Task[None]"
    over: asyncio.Event
    closed: asyncio.Event
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def running(
    accept_seconds: float = 0.0,
    drain_seconds: float = PATIENCE,
    read_seconds: float = PATIENCE,
    router_token: FileToken | None = None,
) -> AsyncIterator[Server]:
    drain, open_requests = Drain(), OpenRequests()

    async def work(request: Request) -> PlainTextResponse:
        await request.body()
        return await open_requests.run(request.receive, answer())

    async def answer() -> PlainTextResponse:
        await server.may_answer.wait()
        return PlainTextResponse("done")

    settings = ServerSettings(accept_seconds=accept_seconds, drain_seconds=drain_seconds, router_token=router_token)
    layers = middleware_stack(settings, drain, RequestMetrics().responses)
    http = HttpServer(Starlette(routes=[Route("/work", work, methods=["POST"])], middleware=layers), None, read_seconds)
    over, closed = asyncio.Event(), asyncio.Event()
    listener = bind("127.0.0.1", 0)
    listener.listen(BACKLOG)
    task = asyncio.create_task(http.serve([listener]))
    shutdown = SignalShutdown(http, settings, drain, open_requests, on_over=over.set, on_closed=closed.set)
    server = Server(http, listener.getsockname(), shutdown, open_requests, task, over, closed)
    server.shutdown.listen()
    server.may_answer.set()
    while not http.started:  # noqa: ASYNC110 - turns of the loop are all it takes
        await asyncio.sleep(0)
    try:
        yield server
    finally:
        http.should_exit = http.force_exit = True
        await task


async def answer_of(client: socket.socket) -> bytes:
    """Returns all that the server sends; the client is told, or finds, that its connection ends."""
    client.setblocking(False)
    text, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        while piece := await loop.sock_recv(client, 65536):
            text += piece
    return text


@pytest.fixture
def connect() -> Iterator[Callable[[Server], socket.socket]]:
    """Connects without the loop, which has not accepted it then."""
    made: list[socket.socket] = []

    def make(server: Server) -> socket.socket:
        made.append(socket.create_connection(server.address))
        return made[-1]

    yield make
    for client in made:
        client.close()


Connect = Callable[[Server], socket.socket]


async def test_who_has_connected_and_sent_is_answered(connect: Connect) -> None:
    async with running() as server:
        client = connect(server)
        client.sendall(ASK)
        await server.http.shutdown([])
        assert (await answer_of(client)).endswith(b"done")


async def test_a_request_on_an_idle_connection_is_answered(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "AGAIN_SECONDS", 0.0)
    async with running() as server:
        client = connect(server)
        await one_answer(client)
        client.sendall(ASK)
        await server.http.shutdown([])
        assert (await answer_of(client)).endswith(b"done")


@pytest.mark.parametrize("is_new", [True, False])
async def test_who_may_just_send_a_request_is_answered(connect: Connect, monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    monkeypatch.setattr(connection, "AGAIN_SECONDS", 0.0 if is_new else PATIENCE)
    async with running(read_seconds=PATIENCE if is_new else 0.1) as server:
        client = connect(server)
        if not is_new:
            await one_answer(client)
        server.http.should_exit = True
        await until_closed(server)
        await asyncio.sleep(0.3)
        client.sendall(ASK)
        answer = await answer_of(client)
        assert answer.endswith(b"done") and b"connection: close" in answer
        async with asyncio.timeout(PATIENCE):
            await server.serving


async def test_a_router_that_is_idle_is_not_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router sends again what it lost on such a connection."""
    (tmp_path / "token").write_text("secret")
    monkeypatch.setattr(connection, "AGAIN_SECONDS", PATIENCE)
    async with running(router_token=FileToken(tmp_path / "token")) as server:
        router, pretender = connect(server), connect(server)
        await one_answer(router, ASK.replace(b"\r\n\r\n", b"\r\nX-Starling-Router: secret\r\n\r\n"))
        await one_answer(pretender, ASK.replace(b"\r\n\r\n", b"\r\nX-Starling-Router: guess\r\n\r\n"))
        server.http.should_exit = True
        assert await answer_of(router) == b""
        assert not server.serving.done()
        pretender.sendall(ASK)
        assert (await answer_of(pretender)).endswith(b"done")


async def test_a_server_that_must_end_waits_for_nobody(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients were answered, are new, or have an open request. From Python 3.12 on its sockets end with their last connection."""
    monkeypatch.setattr(connection, "AGAIN_SECONDS", PATIENCE)
    async with running() as server:
        idle, fresh, busy = connect(server), connect(server), connect(server)
        await one_answer(idle)
        server.may_answer.clear()
        busy.sendall(ASK)
        await until_open(server)
        server.http.should_exit = True
        await until_closed(server)
        began = time.monotonic()
        server.shutdown.end_now()
        assert b"503" in await answer_of(busy)
        assert await answer_of(idle) == await answer_of(fresh) == b""
        await server.serving
        assert time.monotonic() - began < 20


async def test_who_sends_nothing_is_not_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "AGAIN_SECONDS", 0.1)
    async with running(read_seconds=0.1) as server:
        client, fresh = connect(server), connect(server)
        await one_answer(client)
        server.http.should_exit = True
        assert await answer_of(client) == await answer_of(fresh) == b""
        async with asyncio.timeout(PATIENCE):
            await server.serving


async def test_a_balancer_that_lags_more_than_was_thought_is_waited_for(connect: Connect) -> None:
    async with running(accept_seconds=3.0) as server:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.4)
        client, sent = connect(server), time.monotonic()
        client.sendall(ASK)
        assert (await answer_of(client)).endswith(b"done")
        assert not server.closed.is_set()
        await until_closed(server)
        assert server.closed.is_set() and time.monotonic() >= sent + 3.0


async def test_half_of_the_drain_is_for_what_came_late() -> None:
    async with running(drain_seconds=4.0) as server:
        server.open_requests.last_at = math.inf
        began = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        await until_closed(server)
        assert not server.shutdown.drain_over.is_set() and not server.over.is_set()
        assert time.monotonic() >= began + 2.0
        async with asyncio.timeout(PATIENCE):
            await server.shutdown.drain_over.wait()
        assert server.over.is_set() and time.monotonic() >= began + 4.0


async def test_who_has_sent_a_part_of_a_header_is_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "AGAIN_SECONDS", 0.2)
    async with running() as server:
        before, after = connect(server), connect(server)
        await one_answer(before)
        await one_answer(after)
        before.sendall(ASK[:20])
        server.http.should_exit = True
        await until_closed(server)
        after.sendall(ASK[:20])
        await asyncio.sleep(0.5)
        for client in (before, after):
            client.sendall(ASK[20:])
            assert (await answer_of(client)).endswith(b"done")


async def test_a_person_waits_for_running_requests_alone(connect: Connect) -> None:
    async with running(read_seconds=2 * PATIENCE) as server:
        server.may_answer.clear()
        client, fresh = connect(server), connect(server)
        client.sendall(ASK)
        await until_open(server)
        signal.raise_signal(signal.SIGINT)
        async with asyncio.timeout(PATIENCE):
            await server.over.wait()  # what a router holds ends
        assert await answer_of(fresh) == b""
        server.may_answer.set()
        assert (await answer_of(client)).endswith(b"done")
        async with asyncio.timeout(PATIENCE):
            await server.serving


async def test_the_rest_of_a_stream_does_not_count_as_a_request_that_came() -> None:
    """A stream runs in two parts: its first event tells whether there is a stream at all."""
    open_requests, nobody = OpenRequests(), asyncio.Event()

    async def receive() -> Message:
        await nobody.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None: ...

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"data: 2\n\n"

    await EventStream(b"data: 1\n\n", chunks(), open_requests)({"type": "http"}, receive, send)
    assert open_requests.last_at == -math.inf


async def one_answer(client: socket.socket, question: bytes = ASK) -> None:
    client.setblocking(False)
    client.sendall(question)
    async with asyncio.timeout(PATIENCE):
        assert b"200 OK" in await asyncio.get_running_loop().sock_recv(client, 65536)


async def until_open(server: Server) -> None:
    async def is_open() -> bool:
        return len(server.open_requests) == 1

    await until(is_open, "the request to be open")


async def until_closed(server: Server) -> None:
    """Returns when nobody can connect any more."""

    async def is_closed() -> bool:
        return not server.http.servers

    await until(is_closed, "the server to close")
