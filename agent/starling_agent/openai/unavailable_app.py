"""The endpoint's application without an engine: it answers metrics and the version, and 503 with the reason to all else."""

from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.drain import Drain
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError
from starling_agent.http.middleware_stack import with_middleware
from starling_agent.metrics.exporter import Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai.probes import Version
from starling_agent.settings import ServerSettings
from starling_agent.version import starling_version


def create_unavailable_app(
    settings: ServerSettings, drain: Drain, metrics: RequestMetrics, exporter: Exporter, reason: Callable[[], ApiError]
) -> ASGIApp:
    """Makes the application, with the middleware that it has with an engine: keys, limits, ids, logs."""
    return with_middleware(_Unavailable(exporter, reason), settings, drain, metrics.responses)


class _Unavailable:
    def __init__(self, exporter: Exporter, reason: Callable[[], ApiError]) -> None:
        self._exporter = exporter
        self._reason = reason

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/metrics":
                await _send(send, self._exporter.render(), self._exporter.content_type)
            case "/version":
                await _send(send, msgspec.json.encode(Version(starling_version())), "application/json")
            case _:
                await send_error(scope, send, self._reason())


async def _send(send: Send, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
