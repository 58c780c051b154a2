"""POST /v1/responses; GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items, POST /v1/responses/{id}/cancel"""

import re
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starling_engine.errors import InvalidRequest
from starling_engine.outputs import FinishReason

from starling_agent.http.errors import ApiError
from starling_agent.openai.answer_parts import AnswerReader, Piece
from starling_agent.openai.answering import log_request, stream_of
from starling_agent.openai.chat import chat_generation
from starling_agent.openai.endpoint import Caller, Endpoint, caller_of, endpoint_of
from starling_agent.openai.generation import Generation, PromptDelta
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.protocol.answers import ChatLogprob
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.request_body import body_of, body_schema
from starling_agent.openai.responses.conversion import chat_fields, custom_tools, input_items
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.responses.store import StoredResponse
from starling_agent.openai.responses.writer import ResponseWriter
from starling_agent.parsers.events import Content, Reasoning

router = APIRouter(tags=["Responses"])
_OWN_NAMES = (
    (r"^max_completion_tokens$", "max_output_tokens"),
    (r"^(tools\[\d+\])\.function\.", r"\1."),
    (r"^tool_choice\.function\.name$", "tool_choice.name"),
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
    try:
        chat = ChatRequest.checked(endpoint.output_format.without_hints(chat_fields(body, earlier)))
        generation = await chat_generation(endpoint, chat, caller, kind="resp", clamps=True)
    except InvalidRequest as error:
        raise _renamed(error) from None
    log_request(endpoint, generation, bool(body.stream))
    run = _Run(endpoint, generation, body, caller, earlier)
    if body.stream:
        return await stream_of(request, endpoint, run.chunks(), run.writer.fail)
    await endpoint.open_requests.run(request.receive, run.complete())
    return Response(msgspec.json.encode(run.writer.response), media_type="application/json")


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
    answer = {"id": response_id, "object": "response", "deleted": True}
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request, response_id: str) -> Response:
    """Lists the items that a stored response's request brought."""
    stored = endpoint_of(request).responses.get(response_id, caller_of(request).owner)
    items = [{"id": f"item_{i}", **item} for i, item in enumerate(msgspec.json.decode(stored.own_items))]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    answer = {"object": "list", "data": items, "has_more": False, **ends}
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> Response:
    """Cancels a response that is made in the background, which none is yet."""
    endpoint_of(request).responses.get(response_id, caller_of(request).owner)
    raise ApiError(400, "only responses in the background can be cancelled, and this one is not", code="not_in_background")


class _Run:
    """The making of one response."""

    def __init__(
        self, endpoint: Endpoint, generation: Generation, body: ResponsesRequest, caller: Caller, earlier: list[Any]
    ) -> None:
        self.writer = ResponseWriter(_response(generation, body), custom_tools(body))
        self._endpoint = endpoint
        self._generation = generation
        self._body = body
        self._owner = caller.owner
        self._earlier = earlier
        self._reader = AnswerReader(generation.reading) if generation.reading is not None else None
        self._logprobs = LogprobWriter(endpoint.engine.tokenizer, generation.tokens_as_ids)
        self._count = generation.token_count()
        self._unsent_logprobs: list[ChatLogprob] = []
        """Log probabilities of tokens whose text has not been sent."""
        self._reasons = False
        self._reasoning_tokens = 0

    async def complete(self) -> None:
        """Makes all of the response. Raises the engine's errors."""
        async with aclosing(self.chunks(paced=False)) as chunks:
            async for _ in chunks:
                pass

    async def chunks(self, *, paced: bool = True) -> AsyncGenerator[bytes]:
        """Yields the events, and stores the response at its end. With `paced` deltas that come close together share a write."""
        batcher = self._endpoint.batcher
        batcher.streams += paced
        try:
            async with aclosing(self._endpoint.deltas(self._generation)) as deltas:
                events = self.writer.begin()
                async for prompt_delta in deltas:
                    events += self._events(prompt_delta)
                    if events and paced:
                        yield events
                        await batcher.pause()
                    events = b""
        finally:
            batcher.streams -= paced

    def _events(self, prompt_delta: PromptDelta) -> bytes:
        prompt, delta = prompt_delta
        self._count.add(prompt, delta, only_echo=False)
        events = b""
        for output in delta.outputs:
            if self._reader is None:
                pieces: list[Piece] = [Content(output.text)] if output.text else []
            else:
                pieces = self._reader.read(output)
            if (top := self._generation.top_logprobs) is not None and output.logprobs is not None:
                self._unsent_logprobs += self._logprobs.chat(output.token_ids, output.logprobs, top).content
            for piece in pieces:
                self._reasons = isinstance(piece, Reasoning)
                events += self.writer.piece(piece, self._unsent_logprobs)
                self._unsent_logprobs = []
            self._reasoning_tokens += len(output.token_ids) if self._reasons else 0
            if output.finish_reason is not None:
                events += self._finish(output.finish_reason)
        return events

    def _finish(self, reason: FinishReason) -> bytes:
        response, own, encode = self.writer.response, input_items(self._body), msgspec.json.encode
        events = self.writer.finish(reason, self._usage())
        if response["store"]:
            items = encode([*self._earlier, *own, *response["output"]])
            self._endpoint.responses.put(response["id"], StoredResponse(self._owner, encode(response), items, encode(own)))
        return events

    def _usage(self) -> dict[str, Any]:
        count = self._count
        return {
            "input_tokens": count.prompt,
            "input_tokens_details": {"cached_tokens": count.cached, "cache_write_tokens": 0},
            "output_tokens": count.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": count.prompt + count.completion,
        }


def _response(generation: Generation, body: ResponsesRequest) -> dict[str, Any]:
    """Returns the response before its first item."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    summary = body.reasoning.summary if body.reasoning is not None else None
    form = body.text.format if body.text is not None else None
    params = generation.params
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": generation.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_described(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": getattr(params, "top_p", 1.0),
        "presence_penalty": getattr(params, "presence_penalty", 0.0),
        "frequency_penalty": getattr(params, "frequency_penalty", 0.0),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _described(tool: Any) -> Any:
    """Returns a tool with all fields that clients expect of a function."""
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    return {"description": None, "parameters": None, "strict": None, **tool} if is_function else tool


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """Gives the fields of a chat that an error names this API's names."""
    param = error.param
    if param is None:
        return error
    for pattern, name in _OWN_NAMES:
        param = re.sub(pattern, name, param)
    return type(error)(error.message, param)
