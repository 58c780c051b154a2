"""Reads a request's body into its model, out of a resume record where a router sends one.

FastAPI's own reading has other errors and makes a copy.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers
from starling_engine.errors import InvalidRequest

from starling_agent.http.auth import is_of_router
from starling_agent.http.errors import ApiError
from starling_agent.openai.endpoint import endpoint_of
from starling_agent.openai.protocol.base import RequestModel
from starling_agent.openai.stream_record import RESUMABLE, RESUME_TYPE, Note, split_record

M = TypeVar("M", bound=RequestModel)


def body_of(model: type[M], *, resumable: bool = False) -> Callable[[Request], Awaitable[M]]:
    """Makes a FastAPI dependency that returns the parsed body. `resumable`: the route's streams can be resumed by routers."""

    async def read(request: Request) -> M:
        unsaid: dict[str, Any] = {}
        if resumable and wants_notes(request):
            body = _without_notes(request, await request.body())
            if request.scope["state"]["notes"]:
                # The stream may be of a server of an earlier version, where `model` could be left out.
                unsaid = {"model": endpoint_of(request).names[0]}
        else:
            _check_content_type(_media_type(request.headers))
            body = await request.body()
        try:
            return model.parse(body, unsaid)
        except InvalidRequest as error:
            if error.param != "model":
                raise
            raise InvalidRequest(f"{error.message}; {endpoint_of(request).possible_models}", "model") from None

    return read


def wants_notes(request: Request) -> bool:
    """Says whether a router asks for notes in the stream."""
    return RESUMABLE in request.headers and is_of_router(request.scope)


def _without_notes(request: Request, body: bytes) -> bytes:
    """Leaves the notes of a router's request, if there are any, to its caller (see `caller_of`); returns the body without them."""
    notes: list[Note] = []
    if (kind := _media_type(request.headers)) == RESUME_TYPE:
        notes, body = split_record(body)
    else:
        _check_content_type(kind)
    request.scope["state"]["notes"] = notes
    return body


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def body_schema(model: type[RequestModel]) -> dict[str, Any]:
    """Returns `openapi_extra` of a route whose body is `model`; `app` adds the model to the page's components."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _check_content_type(kind: str) -> None:
    # A browser sends text/plain, or no type at all, for a page of another origin without a preflight; JSON needs one.
    if kind != "application/json" and not kind.endswith("+json"):
        got = repr(kind[:100]) if kind else "none"
        raise ApiError(415, f"the content type must be application/json, got {got}", code="unsupported_media_type")
