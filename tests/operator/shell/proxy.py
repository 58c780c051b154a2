"""Proxy between the operator and the API server: it records requests, refuses some, mutes watches, and reports each write."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from starling_operator.cluster.kinds import OPTIONAL
from yarl import URL

from tests.operator.shell.cluster import Access

_HOP = ("host", "authorization", "content-length", "transfer-encoding", "connection", "content-encoding")
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Request:
    """One request of the operator."""

    method: str
    path: str

    @property
    def is_write(self) -> bool:
        return self.method in WRITES and "/leases" not in self.path

    @property
    def is_periodic(self) -> bool:
        """True for a periodic list: of a kind that may come and go, or of nodes."""
        plurals = ("nodes", *(kind.plural for kind in OPTIONAL))
        return self.method == "GET" and any(f"/{plural}?" in self.path for plural in plurals)


class Proxy:
    """`after_write` is called with the number of the operator's writes so far, when the last one was carried out.

    A number is left out when the API server refused that write.

    refuse    requests with this in their path are refused, with `status`: they are forbidden
    mute      a watch with this in its path stays open and shows nothing
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self.requests: list[Request] = []
        self.after_write: Callable[[int], None] = lambda _: None
        self.refuse = self.mute = self.url = ""
        self.status = 403

    async def start(self, port: int = 0) -> None:
        # A watch is open for long; every one needs a connection.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._access.ssl),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        # The session aborts open watches; a handler that is cancelled would leave its TLS connection for the API server to close.
        await self._session.close()
        await self._runner.cleanup()

    @property
    def writes(self) -> list[Request]:
        return [request for request in self.requests if request.is_write]

    def kubeconfig(self, folder: Path) -> Path:
        """Returns a kubeconfig for the operator, with this proxy in place of the API server."""
        path = folder / "proxied.json"
        user, cluster = {"token": "of the proxy"}, {"server": self.url}
        context = {"cluster": "c", "user": "u"}
        named = {"clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "u", "user": user}]}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            **named,
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        path.write_text(json.dumps(config))
        return path

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        seen = Request(request.method, request.path_qs)
        self.requests.append(seen)
        if self.refuse and self.refuse in seen.path:
            refusal = {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": f"{seen.path} is forbidden"}
            return web.json_response(refusal, status=self.status)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP} | self._access.headers
        url = URL(self._access.url + request.path_qs, encoded=True)
        body, alone = await request.read(), ("Content-Type", "Accept-Encoding")
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, skip_auto_headers=alone
        ) as response:
            if seen.is_write and response.status < 300:
                self.after_write(len(self.writes))
            return await self._stream(request, response)

    async def _stream(self, request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {name: value for name, value in response.headers.items() if name.lower() not in _HOP[2:5]}
        answer = web.StreamResponse(status=response.status, headers=headers)
        try:
            await answer.prepare(request)
            async for chunk in response.content.iter_any():
                while self._is_muted(request):  # noqa: ASYNC110 - a test sets and clears a plain word
                    await asyncio.sleep(0.05)
                await answer.write(chunk)
        except (ConnectionError, aiohttp.ClientError, asyncio.CancelledError):
            return answer
        return answer

    def _is_muted(self, request: web.Request) -> bool:
        return bool(self.mute) and self.mute in request.path and request.query.get("watch") == "true"
