"""POST /v1/responses; GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items, POST /v1/responses/{id}/cancel"""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starling_engine.errors import InvalidRequest

from starling_agent.http.errors import ApiError
from starling_agent.openai.answering import json_response, log_request, stream_of
from starling_agent.openai.chat_generation import chat_generation
from starling_agent.openai.endpoint import caller_of, endpoint_of
from starling_agent.openai.field_names import TOOL_NAMES, fields_named
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.request_body import body_of, body_schema
from starling_agent.openai.responses.conversion import chat_fields
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.responses.run import ResponseRun

router = APIRouter(tags=["Responses"])
_OWN_NAMES = (
    (r"^max_completion_tokens$", "max_output_tokens"),
    *TOOL_NAMES,
    (r"^response_format\.json_schema", "text.format"),
    (r"^response_format", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^messages.*", "input"),
)
"""This API's names for a chat's fields. A chat's messages are not the request's items, so their numbers are left out."""


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create(request: Request, body: Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest))]) -> Response:
    """Makes a response, whole or as a stream of events."""
    endpoint, caller = endpoint_of(request), caller_of(request)
    if body.background:
        raise InvalidRequest("responses are not made in the background yet; leave it out", "background")
    earlier: list[Any] = []
    if body.previous_response_id is not None:
        earlier = msgspec.json.decode(endpoint.responses.get(body.previous_response_id, caller.owner).items)
    fields = endpoint.output_format.without_hints(chat_fields(body, earlier))
    with fields_named(_OWN_NAMES):
        generation = await chat_generation(endpoint, ChatRequest.checked(fields), caller, kind="resp", clamps=True)
    log_request(endpoint, generation, bool(body.stream))
    run = ResponseRun(endpoint, generation, body, caller, earlier)
    if body.stream:
        return await stream_of(request, endpoint, run.chunks(), run.writer.fail)
    await endpoint.open_requests.run(request.receive, run.complete())
    return json_response(run.writer.response)


@router.post("/v1/responses/compact")
async def compact() -> Response:
    """Answers 404: conversations are not compacted here."""
    raise ApiError(404, "conversations are not compacted here; send the items that are to be kept", code="not_found")


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """Returns a stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest("a stored response is not streamed", "stream")
    stored = endpoint_of(request).responses.get(response_id, caller_of(request).owner)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Deletes a stored response."""
    endpoint_of(request).responses.delete(response_id, caller_of(request).owner)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Lists the items that a stored response's request brought."""
    stored = endpoint_of(request).responses.get(response_id, caller_of(request).owner)
    items = [{"id": f"item_{i}", **item} for i, item in enumerate(msgspec.json.decode(stored.own_items))]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": items, "has_more": False, **ends})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """Cancels a response that is made in the background, which none is yet."""
    endpoint_of(request).responses.get(response_id, caller_of(request).owner)
    raise ApiError(400, "only responses in the background can be cancelled, and this one is not", code="not_in_background")
