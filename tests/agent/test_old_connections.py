"""Connections that clients keep: closed now and then with an answer, so that new servers get their share."""

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
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai.app import layers
from starling_agent.server.http_server import HttpServer, bind
from starling_agent.settings import ServerSettings
from starling_cli.local.front import Address, LocalProxy

SECONDS = 0.1
PATIENCE = 5.0


class Served:
    """A server, and the connections that its requests came on."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.url = f"http://{address[0]}:{address[1]}"
        self.connections: list[int] = []


@contextlib.asynccontextmanager
async def served(connection_seconds: float, drain: Drain | None = None) -> AsyncIterator[Served]:
    """The endpoint's own layers around a list of models, and a stream that outlives its connection's time."""

    async def models(request: Request) -> JSONResponse:
        assert request.client is not None
        here.connections.append(request.client.port)
        return JSONResponse({"object": "list", "data": []})

    async def stream(_: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            for _ in range(8):
                yield "x"
                await asyncio.sleep(SECONDS / 4)

        return StreamingResponse(pieces())

    app = Starlette(
        routes=[Route("/v1/models", models), Route("/stream", stream)],
        middleware=layers(ServerSettings(), drain or Drain(), RequestMetrics()),
    )
    server, listener = HttpServer(app, connection_seconds=connection_seconds), bind("127.0.0.1", 0)
    here = Served(listener.getsockname())
    listener.listen()
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield here
    finally:
        server.should_exit = server.force_exit = True
        await task


async def test_a_new_server_gets_requests_of_a_client_that_keeps_its_connection():
    async with served(SECONDS) as old, served(SECONDS) as new:
        front = LocalProxy()
        port = await front.listen("127.0.0.1", 0)
        front.set_ready([old.address])
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            await client.models.list()
            front.set_ready([old.address, new.address])
            async with asyncio.timeout(PATIENCE):
                while not new.connections:
                    await client.models.list()
        await front.close()


async def test_a_stream_is_never_cut_and_what_comes_after_it_goes_on():
    async with served(SECONDS) as here, httpx.AsyncClient(base_url=here.url) as client:
        await client.get("/v1/models")
        assert (await client.get("/stream")).text == "x" * 8
        for _ in range(2):
            await client.get("/v1/models")
    assert len(set(here.connections)) > 1


async def test_a_body_that_is_answered_early_gets_its_answer_all_the_same():
    async with served(1e-9) as here:
        reader, writer = await asyncio.open_connection(*here.address)
        writer.write(b"POST /nowhere HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n")
        assert b"connection" not in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@pytest.mark.parametrize(("seconds", "draining", "told"), [(0, False, 0), (3600, False, 0), (1e-9, False, 1), (1e-9, True, 1)])
async def test_a_connection_is_told_once_that_it_ends(seconds: float, draining: bool, told: int):
    async with served(seconds, Drain(draining)) as here, httpx.AsyncClient(base_url=here.url) as client:
        answer = await client.get("/v1/models")
    assert answer.headers.get_list("connection") == ["close"] * told
