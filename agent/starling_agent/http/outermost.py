"""The outermost middleware of each request: its id, `Connection: close` while draining, the log line, the 500."""

import re
import time
import uuid
from collections import Counter

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starling_agent.drain import Drain
from starling_agent.http.error_forms import ERROR, send_error
from starling_agent.http.errors import as_api_error

REQUEST_ID = b"x-request-id"
_PRINTABLE = re.compile(rb"[!-~]{1,128}")
QUIET_ROUTES = ("/health", "/ping", "/ready", "/load", "/metrics", "/backend", "/backend/proof", "/ui/state", "/router/report")
"""Routes that machines poll every few seconds; their log lines would bury the others."""

log = structlog.get_logger("starling.http")


class OutermostMiddleware:
    """Counts answers in `responses` by (route, status)."""

    def __init__(self, app: ASGIApp, *, drain: Drain, responses: "Counter[tuple[str, int]]", access_log: bool) -> None:
        self._app = app
        self._drain = drain
        self._responses = responses
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        exchange = _Exchange(send, request_id, self._drain)
        began = time.monotonic()
        try:
            await self._app(scope, receive, exchange.send)
        except Exception as error:
            log.exception("request failed", request_id=request_id, path=scope["path"])
            if exchange.status:
                # The status has been sent; uvicorn must cut the connection, so that the client sees an incomplete answer.
                raise
            await send_error(scope, exchange.send, as_api_error(error))
        finally:
            self._record(scope, request_id, exchange.status, time.monotonic() - began)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = _route(scope)
        self._responses[route, status] += 1
        if self._access_log and route not in QUIET_ROUTES:
            client = scope.get("client")
            log.info(
                "request",
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                seconds=round(seconds, 4),
                request_id=request_id,
                client=client[0] if client else None,
                **_error_fields(scope),
            )


class _Exchange:
    """Adds headers to one request's answer. `status` is 0 until the answer has begun."""

    def __init__(self, send: Send, request_id: str, drain: Drain) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._drain = drain
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID, self._request_id)]
            if self._drain.draining:
                headers = [pair for pair in headers if pair[0] != b"connection"]
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == REQUEST_ID and _PRINTABLE.fullmatch(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex


def _error_fields(scope: Scope) -> dict[str, str]:
    """Returns `code` and `param` of the error that was answered. Its message may have words of the prompt."""
    detail = scope["state"].get(ERROR)
    found = {"code": detail.code, "param": detail.param} if detail is not None else {}
    return {name: value for name, value in found.items() if value}


def _route(scope: Scope) -> str:
    """Returns the route's pattern, never the raw path: every path would be a time series of its own."""
    route = scope.get("route")
    return str(getattr(route, "path", None) or "none")
