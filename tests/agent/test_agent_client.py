"""The client of agents' admin endpoints, over real HTTP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from starling_agent.client.agent_client import AgentClient, AgentRefusal, NoAnswer
from starling_agent.client.bounded import BadAnswer
from starling_agent.contract.scale import ScaleRequest


@contextlib.asynccontextmanager
async def agent(status: int, body: str = "", **headers: str) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Host and port of an agent that answers every request so, and the requests that it got."""
    requests: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        requests.append(request)
        return web.Response(status=status, text=body, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}", requests
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """Host and port of an agent that takes requests and answers none."""
    took = asyncio.Event()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await took.wait()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        took.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ('{"error": {"message": "not now", "code": "rank_dead"}}', "rank_dead", "not now"),
        ('{"error": {"message": "not now", "code": null}}', "http_409", "not now"),
        ('{"error": "not now"}', "http_409", 'its leader answers 409: {"error": "not now"}'),
        (" nonsense ", "http_409", "its leader answers 409: nonsense"),
        ("[" * 10_000, "http_409", f"its leader answers 409: {'[' * 200}"),
    ],
)
async def test_a_refusal_has_a_code_and_a_message(body: str, code: str, message: str) -> None:
    async with agent(409, body) as (address, _), AgentClient(60) as client:
        with pytest.raises(AgentRefusal) as refused:
            await client.scale(address, "t", ScaleRequest(operation="a", data=2), seconds=60)
    assert (refused.value.status, refused.value.code, refused.value.message) == (409, code, message)


async def test_operations_are_put_and_deleted_by_their_id() -> None:
    async with agent(202) as (address, requests), AgentClient(60) as client:
        await client.scale(address, "sesame", ScaleRequest(operation="a", data=2), seconds=60)
        await client.cancel(address, "sesame", "a", seconds=60)
    put, delete = requests
    assert (put.method, put.path_qs, await put.json()) == ("PUT", "/admin/scale", {"operation": "a", "data": 2})
    assert (delete.method, delete.path_qs) == ("DELETE", "/admin/scale?operation=a")
    for request in requests:
        assert (request.headers["Authorization"], request.headers["Accept-Encoding"]) == ("Bearer sesame", "identity")


async def test_a_report_is_polled_with_what_the_agent_is_notified_of() -> None:
    async with agent(200, "{}") as (address, requests), AgentClient(60) as client:
        with pytest.raises(BadAnswer, match="its report cannot be read: version: Field required"):
            await client.report(address, "t", wait=30, commit="c" * 40, ends_in=12.34, sleep=2, seconds=60)
    assert dict(requests[0].query) == {"wait": "30", "commit": "c" * 40, "ends_in": "12.3", "sleep": "2"}


async def test_a_redirection_is_not_followed() -> None:
    async with agent(302, Location="/elsewhere") as (address, requests), AgentClient(60) as client:
        with pytest.raises(BadAnswer):
            await client.report(address, "t", seconds=60)
    assert [request.path for request in requests] == ["/admin/report"]


async def test_nobody_there() -> None:
    async with agent(200) as (address, _):
        pass
    async with AgentClient(60) as client:
        with pytest.raises(NoAnswer, match=address):
            await client.raw_report(address, "t", seconds=60)


async def test_a_cancellation_that_comes_as_the_time_is_over_ends_the_call() -> None:
    async with silent() as address, AgentClient(60) as client:
        call = asyncio.create_task(client.raw_report(address, "t", seconds=0.3))
        asyncio.get_running_loop().call_later(0.4, call.cancel)
        await asyncio.sleep(0.1)
        time.sleep(0.5)  # noqa: ASYNC251 - both are due when the loop goes on, and the limit comes first
        await asyncio.wait([call])
    assert call.cancelled()


async def test_an_agent_that_does_not_answer_in_time() -> None:
    async with silent() as address, AgentClient(60) as client:
        with pytest.raises(NoAnswer, match="TimeoutError"):
            await client.raw_report(address, "t", seconds=0.1)
