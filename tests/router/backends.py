"""HTTP servers that answer as agents do, or as a test wants them to fail."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
from aiohttp import web
from starling_agent.contract.backend import BackendState
from starling_agent.contract.router import PROOF_PATH, ROUTER_TOKEN, token_proof

Respond = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def echo(request: web.Request) -> web.StreamResponse:
    body = await request.text()
    headers = {name.lower(): value for name, value in request.headers.items()}
    return web.json_response({"path": request.path_qs, "method": request.method, "body": body, "headers": headers})


def refuse(status: int) -> Respond:
    async def respond(_: web.Request) -> web.StreamResponse:
        error = {"message": f"refused with {status}", "type": "x", "param": None, "code": "shutting_down" if status == 503 else "x"}
        return web.json_response({"error": error}, status=status, headers={"Retry-After": "7"})

    return respond


async def drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(10)
    raise AssertionError


def stream(count: int, *, content_type: str = "text/event-stream", then: Respond | None = None) -> Respond:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        for i in range(count):
            await response.write(f"data: {i}\n\n".encode())
            await asyncio.sleep(0.01)
        return response if then is None else await then(request)

    return respond


class Stepwise:
    """A stream whose next piece comes when the client has had the one before: it ends only where none waits for another."""

    def __init__(self, count: int) -> None:
        self._count, self._had = count, asyncio.Semaphore(0)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(self._count):
            await response.write(f"data: {number}\n\n".encode())
            await self._had.acquire()
        return response

    async def chunks(self, answer: httpx.Response) -> list[bytes]:
        """Reads the stream, piece by piece."""
        read, known = [], 0
        async for chunk in answer.aiter_raw():
            read.append(chunk)
            count = b"".join(read).count(b"\n\n")
            for _ in range(count - known):
                self._had.release()
            known = count
        return read


class StubBackend:
    """One server. `respond` answers all but /backend, which tells `state`, next times `late`; `paths` were asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.respond: Respond = echo
        self.state = BackendState(pod=name, ready=True, open=0, models=["m"], block_size=16)
        self.paths: list[str] = []
        self.late = 0
        self.url = ""
        self.token = b""
        """The routers' token; empty: it has none, and says so."""
        self.refuses_proof = 0
        """The status by which it refuses a proof, as servers of others do; 0: it gives one."""
        self.shown: list[str | None] = []
        """Routers' tokens that it was shown."""
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == PROOF_PATH:
            if self.refuses_proof:
                return web.Response(status=self.refuses_proof)
            proof = token_proof(self.token, request.query["nonce"].encode()) if self.token else ""
            return web.json_response({"proof": proof})
        self.shown.append(request.headers.get(ROUTER_TOKEN))
        if request.path == "/backend":
            if self.late:
                self.late -= 1
                await asyncio.sleep(5)
            return web.json_response(self.state.model_dump())
        self.paths.append(request.path)
        return await self.respond(request)
