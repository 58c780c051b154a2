"""POST /v1/responses; GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items, POST /v1/responses/{id}/cancel"""

import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starling_engine.errors import InvalidRequest

from starling_agent.http.errors import ApiError
from starling_agent.http.open_requests import OpenRequests
from starling_agent.openai.answering import json_response, log_request, stream_of
from starling_agent.openai.chat_generation import chat_generation
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.event_stream import EventStream
from starling_agent.openai.field_names import TOOL_NAMES, OwnName, fields_named
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.request_body import body_of, body_schema, wants_notes
from starling_agent.openai.responses.conversion import chat_fields
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.responses.queries import check_shown, events_after, page_of
from starling_agent.openai.responses.run import ResponseRun
from starling_agent.openai.responses.store import CONTINUABLE
from starling_agent.openai.stream_notes import counted
from starling_agent.openai.stream_record import COUNTED, LAST_NOTE, RESUMABLE

router = APIRouter(tags=["Responses"])
_COUNTED = {RESUMABLE: COUNTED}
_OWN_NAMES = (
    OwnName(r"^max_completion_tokens$", "max_output_tokens"),
    *TOOL_NAMES,
    OwnName(r"^response_format\.json_schema", "text.format"),
    OwnName(r"^response_format", "text.format"),
    OwnName(r"^reasoning_effort$", "reasoning.effort"),
    OwnName(r"^messages.*", "input"),
)
"""This API's names for a chat's fields, but for its calls. Of other messages nothing is refused that was an item before."""


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create(request: Request, body: Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest))]) -> Response:
    """Makes a response, whole or as a stream of events, or begins to make it in the background."""
    endpoint, caller = endpoint_of(request), caller_of(request)
    if body.background and body.store is False:
        raise InvalidRequest("a response in the background has to be stored; leave store out", "background")
    earlier = await _earlier_items(endpoint, body.previous_response_id, caller.owner)
    fields, names_of_calls = chat_fields(body, earlier)
    chat = endpoint.output_format.without_hints(fields)
    with fields_named(itertools.chain(names_of_calls, _OWN_NAMES)):
        generation = await chat_generation(endpoint, ChatRequest.checked(chat), caller, kind="resp", lenient=True)
    generation = generation.with_names(_OWN_NAMES)
    log_request(endpoint, generation, bool(body.stream))
    run = ResponseRun(endpoint, generation, body, caller, earlier)
    if body.background:
        return await _in_background(request, endpoint, run, streams=bool(body.stream))
    if body.stream:
        return await _streamed(request, endpoint, run)
    await endpoint.open_requests.run(request.receive, run.complete())
    return json_response(run.writer.response)


async def _earlier_items(endpoint: Endpoint, response_id: str | None, owner: str | None) -> list[Any]:
    """Returns the items of the response that is continued. Raises ApiError 404, and InvalidRequest for one that cannot be."""
    if response_id is None:
        return []
    try:
        stored = await endpoint.background.get(response_id, owner)
    except ApiError as error:
        error.detail.param = "previous_response_id"
        raise
    if stored.status not in CONTINUABLE:
        raise InvalidRequest(f"the response is {stored.status}; possible: {', '.join(CONTINUABLE)}", "previous_response_id")
    if not stored.items:
        raise InvalidRequest("its conversation was too large to be stored (see --max-stored-bytes)", "previous_response_id")
    items: list[Any] = msgspec.json.decode(stored.items)
    return items


async def _streamed(request: Request, endpoint: Endpoint, run: ResponseRun) -> Response:
    """Streams a response as it is made; it ends where its server does, so notes count its tokens alone."""
    if not wants_notes(request):
        return await stream_of(request, endpoint, run.chunks(), run.writer.fail)
    chunks = counted(run.chunks(), lambda: run.output_tokens)
    return await stream_of(request, endpoint, chunks, lambda error: run.writer.fail(error) + LAST_NOTE, _COUNTED)


async def _in_background(request: Request, endpoint: Endpoint, run: ResponseRun, *, streams: bool) -> Response:
    if not endpoint.responses.takes(run.size):
        raise InvalidRequest("the conversation is too large to be stored (see --max-stored-bytes)", "background")
    made = await endpoint.background.start(run, has_events=streams)
    if not streams:
        return Response(made.stored().response, media_type="application/json")
    if not wants_notes(request):
        return _followed(made.events(-1))
    return _followed(counted(made.events(-1), lambda: run.output_tokens), _COUNTED)


def _followed(events: AsyncGenerator[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """Streams events of a response in the background. It is the response that ends with the server, and with it the stream."""
    return EventStream(b"", events, OpenRequests(), headers)


@router.post("/v1/responses/compact")
async def compact() -> Response:
    """Answers 404: conversations are not compacted here."""
    raise ApiError(404, "conversations are not compacted here; send the items that are to be kept", code="not_found")


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """Returns a stored response; with ?stream=true the events of one in the background, from behind &starting_after=N on."""
    check_shown(request.query_params)
    background, owner = endpoint_of(request).background, caller_of(request).owner
    if (after := events_after(request.query_params)) is not None:
        return _followed(await background.events(response_id, owner, after))
    stored = await background.get(response_id, owner)
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    """Deletes a stored response, and cancels it if it is still made."""
    await endpoint_of(request).background.delete(response_id, caller_of(request).owner)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Lists the items that a stored response's request brought, the last first: order, limit and after say which."""
    check_shown(request.query_params)
    stored = await endpoint_of(request).background.get(response_id, caller_of(request).owner)
    return json_response(page_of(msgspec.json.decode(stored.own_items), request.query_params))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """Cancels a response in the background; one that has ended stays as it is."""
    stored = await endpoint_of(request).background.cancel(response_id, caller_of(request).owner)
    return Response(stored.response, media_type="application/json")
