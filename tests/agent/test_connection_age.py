"""Old connections are closed with an answer, so that new servers get requests too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starling_agent.drain import Drain
from starling_agent.http.middleware_stack import middleware_stack
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.server.http_server import HttpServer, bind
from starling_agent.settings import ServerSettings
from starling_cli.local.proxy import Address, LocalProxy

SECONDS = 0.1
PATIENCE = 60.0


class RunningServer:
    """A server, and the client ports that its requests came from."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.url = f"http://{address[0]}:{address[1]}"
        self.connections: list[int] = []


@contextlib.asynccontextmanager
async def running_server(connection_seconds: float, drain: Drain | None = None) -> AsyncIterator[RunningServer]:
    """Runs the endpoint's middleware with a list of models, and a stream longer than `connection_seconds`."""

    async def models(request: Request) -> JSONResponse:
        assert request.client is not None
        server.connections.append(request.client.port)
        return JSONResponse({"object": "list", "data": []})

    async def stream(_: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            for _ in range(8):
                yield "x"
                await asyncio.sleep(SECONDS / 4)

        return StreamingResponse(pieces())

    app = Starlette(
        routes=[Route("/v1/models", models), Route("/stream", stream)],
        middleware=middleware_stack(ServerSettings(), drain or Drain(), RequestMetrics().responses),
    )
    http_server, listener = HttpServer(app, connection_seconds=connection_seconds), bind("127.0.0.1", 0)
    server = RunningServer(listener.getsockname())
    listener.listen()
    task = asyncio.create_task(http_server.serve([listener]))
    try:
        yield server
    finally:
        http_server.should_exit = http_server.force_exit = True
        await task


async def test_a_new_server_gets_requests_of_a_client_with_an_old_connection():
    async with running_server(SECONDS) as old, running_server(SECONDS) as new:
        proxy = LocalProxy()
        port = await proxy.listen("127.0.0.1", 0)
        proxy.set_ready([old.address])
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            await client.models.list()
            proxy.set_ready([old.address, new.address])
            async with asyncio.timeout(PATIENCE):
                while not new.connections:
                    await client.models.list()
        await proxy.close()


async def test_a_stream_is_never_cut_when_its_connection_is_old():
    async with running_server(SECONDS) as server, httpx.AsyncClient(base_url=server.url) as client:
        await client.get("/v1/models")
        assert (await client.get("/stream")).text == "x" * 8
        for _ in range(2):
            await client.get("/v1/models")
    assert len(set(server.connections)) > 1


async def test_a_request_answered_before_its_body_came_gets_its_answer():
    async with running_server(1e-9) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n")
        assert b"connection" not in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(("seconds", "draining", "expected"), [(0, False, 0), (3600, False, 0), (1e-9, False, 1), (1e-9, True, 1)])
async def test_an_answer_has_one_close_header_at_most(seconds: float, draining: bool, expected: int):
    async with running_server(seconds, Drain(draining)) as server, httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.get("/v1/models")
    assert answer.headers.get_list("connection") == ["close"] * expected
