"""A router that serves in the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import httpx
from starling_agent.server.http_server import HttpServer
from starling_router.router import ServiceRouter

from tests.waiting import until

Start = Callable[..., Awaitable[httpx.AsyncClient]]
"""The type of the fixture `start`."""


@asynccontextmanager
async def serving(router: ServiceRouter, backends: Mapping[str, str], ready: int) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of the router, once so many of its backends are ready."""
    router.set_backends(backends)
    server = HttpServer(router.app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits()) as client:

            async def are_ready() -> bool:
                return await metric(client, "router_ready") >= ready

            await until(are_ready, f"{ready} backends to be ready")
            yield client
        server.should_exit = True
        await task
        await router.close()


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """Returns the sum over all label sets of one of the router's metrics."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"starling:{name} ", f"starling:{name}{{")))
