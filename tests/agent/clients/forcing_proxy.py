"""Stands between a server and a client that writes its own requests, and changes these on their way."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import httpx

from tests.agent.clients.forced import Body

GENERATING = ("/v1/responses", "/v1/chat/completions", "/v1/messages")
Change = Callable[[Body], Body]


class Seen(NamedTuple):
    method: str
    path: str
    status: int
    body: Body


class ForcingProxy(ThreadingHTTPServer):
    """`seen` has each request whose answer has begun; `change` is asked for those that generate."""

    daemon_threads = True

    def __init__(self, server_url: str, change: Change) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.server_url = server_url
        self.change = change
        self.seen: list[Seen] = []

    def requests(self, path: str) -> list[Seen]:
        return [request for request in self.seen if request.path == path]


@contextmanager
def forcing_proxy(server_url: str, change: Change) -> Iterator[ForcingProxy]:
    """Serves until the block ends."""
    with ForcingProxy(server_url, change) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: ForcingProxy

    def do_GET(self) -> None:
        self._pass_on({}, {})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._pass_on(body, self.server.change(body) if self._route in GENERATING else body)

    @property
    def _route(self) -> str:
        return self.path.partition("?")[0]

    def _pass_on(self, body: Body, changed: Body) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        content = json.dumps(changed).encode() if changed else None
        with httpx.stream(
            self.command, f"{self.server.server_url}{self.path}", content=content, headers=headers, timeout=60
        ) as answer:
            self.send_response(answer.status_code)
            for name in ("content-type", "content-encoding"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.end_headers()
            self.server.seen.append(Seen(self.command, self._route, answer.status_code, body))  # before the client has its end
            for piece in answer.iter_raw():
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Writes nothing: `seen` has it."""
