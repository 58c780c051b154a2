"""Errors in the form of their API: Anthropic's on its paths, OpenAI's on all others."""

import msgspec
from starlette.types import Scope, Send

from starling_agent.http.errors import ApiError

ANTHROPIC = "/v1/messages"
"""The paths of Anthropic's API are this one and those below it."""
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by status; those of others are api_error."""
ERROR = "error"
"""Key of a request's state under which the detail of its error is."""


def error_body(error: ApiError, scope: Scope) -> bytes:
    """Returns the body of an error that answers a request, and notes it for the request's log line."""
    scope["state"][ERROR] = error.detail
    return anthropic_error(error, scope["state"]["request_id"]) if is_anthropic(scope) else error.body()


def error_event(error: ApiError, scope: Scope) -> bytes:
    """Returns the event that ends a stream with an error."""
    return body_as_event(error_body(error, scope), scope)


def body_as_event(body: bytes, scope: Scope) -> bytes:
    """Returns the event that ends a stream with the body of an error, which is one line."""
    name = b"event: error\n" if is_anthropic(scope) else b""
    return name + b"data: " + body + b"\n\n"


def is_anthropic(scope: Scope) -> bool:
    """Says whether a client of Anthropic's API asks: by the path, and where both APIs have it by the version that they all send."""
    path = f"{scope['path']}/"
    if path.startswith(f"{ANTHROPIC}/"):
        return True
    return path.startswith("/v1/models/") and any(name == b"anthropic-version" for name, _ in scope["headers"])


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """Returns an error's body as Anthropic's API has it. `param` and `code` are as in OpenAI's."""
    detail = error.detail
    kind = ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fields = {"type": kind, "message": error.message, "param": detail.param, "code": detail.code}
    return msgspec.json.encode({"type": "error", "error": fields, "request_id": request_id})


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Sends an error from a layer that is before the application's own error handling."""
    body = error_body(error, scope)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
