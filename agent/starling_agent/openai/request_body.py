"""Reads a request's body into its model. FastAPI's own reading has other errors and makes a copy."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request

from starling_agent.http.errors import ApiError
from starling_agent.openai.protocol.base import RequestModel

M = TypeVar("M", bound=RequestModel)


def body_of(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Makes a FastAPI dependency that returns the parsed body."""

    async def read(request: Request) -> M:
        _check_content_type(request.headers.get("content-type"))
        return model.parse(await request.body())

    return read


def body_schema(model: type[RequestModel]) -> dict[str, Any]:
    """Returns `openapi_extra` of a route whose body is `model`; `app` adds the model to the page's components."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _check_content_type(content_type: str | None) -> None:
    # A browser sends text/plain, or no type at all, for a page of another origin without a preflight; JSON needs one.
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        got = repr(kind[:100]) if kind else "none"
        raise ApiError(415, f"the content type must be application/json, got {got}", code="unsupported_media_type")
