"""Errors as Anthropic's API writes them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

import msgspec

from starling_agent.http.errors import ApiError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by status; those of others are api_error."""


def anthropic_error(error: ApiError, request_id: str | None = None) -> bytes:
    """Returns an error's body. `param` and `code` are as in OpenAI's."""
    detail = error.detail
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = f"{detail.param}: {detail.message}" if detail.param else detail.message
    fields = {"type": kind, "message": message, "param": detail.param, "code": detail.code}
    return msgspec.json.encode({"type": "error", "error": fields, "request_id": request_id})


def error_event(error: ApiError) -> bytes:
    """Returns the event that ends a stream with an error."""
    return b"event: error\ndata: " + anthropic_error(error) + b"\n\n"
