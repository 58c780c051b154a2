"""Limits of a request's header."""

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError

MAX_HEADER_BYTES = 32 * 1024
"""Bytes, with the request line."""
MAX_HEADER_FIELDS = 100
"""Fields. Apache's httpd has the same limit; proxies and meshes add about twenty."""


class HeaderLimit:
    """Answers 431 to a header of too many bytes or fields. For one that is not complete yet see `server.connection`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_too_large(scope):
            await send_error(scope, send, header_too_large())
        else:
            await self._app(scope, receive, send)


def is_too_large(scope: Scope) -> bool:
    headers = scope["headers"]
    line = len(scope["raw_path"]) + len(scope["query_string"])
    # Each field has a colon, a space and the end of its line.
    size = line + sum(len(name) + len(value) + 4 for name, value in headers)
    return len(headers) > MAX_HEADER_FIELDS or size > MAX_HEADER_BYTES


def header_too_large() -> ApiError:
    message = f"the header may have {MAX_HEADER_BYTES} bytes and {MAX_HEADER_FIELDS} fields"
    return ApiError(431, message, code="header_too_large")
