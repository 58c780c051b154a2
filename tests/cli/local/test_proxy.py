"""The proxy port: round robin over who is ready, and an honest 503 over nobody."""

import asyncio
import contextlib

import httpx
import pytest
from starling_cli.local.proxy import LocalProxy


class Backend:
    """Answers with its name, keeps the connection; `hold` makes it wait in the middle of the answer."""

    def __init__(self, name):
        self.name = name
        self.address = ("127.0.0.1", 0)
        self.release = asyncio.Event()
        self.release.set()
        self.reached, self.gone = asyncio.Event(), asyncio.Event()

    async def start(self):
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()[:2]
        return self

    async def answer(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.reached.set()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.name))
                writer.write(self.name[:1].encode())
                await writer.drain()
                await self.release.wait()
                writer.write(self.name[1:].encode())
        self.gone.set()
        writer.close()


@contextlib.asynccontextmanager
async def running(*names):
    backends = [await Backend(name).start() for name in names]
    proxy = LocalProxy()
    port = await proxy.listen("127.0.0.1", 0)
    try:
        yield proxy, f"http://127.0.0.1:{port}", backends
    finally:
        await proxy.close()
        for backend in backends:
            backend.server.close()


async def get(url):
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(url)


async def test_nobody_is_ready():
    async with running() as (_, url, _):
        answer = await get(url)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "not_ready"
    assert answer.headers["retry-after"] == "1"


async def test_connections_go_round():
    async with running("one", "two") as (proxy, url, backends):
        proxy.set_ready([backend.address for backend in backends])
        assert sorted([(await get(url)).text for _ in range(6)]) == ["one"] * 3 + ["two"] * 3


async def test_who_does_not_accept_is_skipped():
    async with running("one") as (proxy, url, backends):
        proxy.set_ready([("127.0.0.1", 9), backends[0].address])
        assert {(await get(url)).text for _ in range(4)} == {"one"}


async def test_an_open_answer_survives_that_its_backend_is_taken_out():
    async with running("one", "two") as (proxy, url, backends):
        proxy.set_ready([backends[0].address])
        backends[0].release.clear()
        slow = asyncio.create_task(get(url))
        await backends[0].reached.wait()
        proxy.set_ready([backends[1].address])
        assert (await get(url)).text == "two"
        backends[0].release.set()
        assert (await slow).text == "one"


async def test_a_client_that_leaves_ends_the_backends_connection():
    async with running("one") as (proxy, url, backends):
        proxy.set_ready([backends[0].address])
        await get(url)
        async with asyncio.timeout(60):
            await backends[0].gone.wait()


async def test_a_port_in_use():
    async with running() as (_, url, _):
        port = int(url.rpartition(":")[2])
        with pytest.raises(OSError):
            await LocalProxy().listen("127.0.0.1", port)
