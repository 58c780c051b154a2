"""POST /v1/messages and /v1/messages/count_tokens"""

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from starling_engine.errors import InvalidRequest

from starling_agent.openai.answering import json_response, log_request, stream_of
from starling_agent.openai.anthropic.answers import MessageStream, TokenCountAnswer, whole_message
from starling_agent.openai.anthropic.conversion import chat_fields, sampling_fields
from starling_agent.openai.anthropic.errors import error_event
from starling_agent.openai.anthropic.protocol import CountRequest, MessagesRequest
from starling_agent.openai.chat import chat_generation, chat_prompt
from starling_agent.openai.collecting import collect
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.request_body import body_of, body_schema

PATH = "/v1/messages"
router = APIRouter(tags=["Anthropic"])
_OWN_NAMES = (
    (r"^max_completion_tokens$", "max_tokens"),
    (r"^stop$", "stop_sequences"),
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function\.", r"\1."),
    (r"^tool_choice\.function\.name$", "tool_choice.name"),
    (r"^response_format.*", "output_config.format.schema"),
    (r"^reasoning_effort$", "thinking"),
    (r"^messages\[\d+\].*", "messages"),
)
"""This API's names for a chat's fields. A chat's messages are not those of the request, so their numbers are left out."""


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def messages(request: Request, body: Annotated[MessagesRequest, Depends(body_of(MessagesRequest))]) -> Response:
    """Answers a conversation, whole or as a stream of events."""
    endpoint, caller = endpoint_of(request), caller_of(request)
    fields = endpoint.output_format.without_hints(chat_fields(body)) | sampling_fields(body)
    try:
        chat = ChatRequest.checked(fields)
        generation = await chat_generation(endpoint, chat, caller, kind="msg", clamps=True)
    except InvalidRequest as error:
        raise _renamed(error) from None
    log_request(endpoint, generation, bool(body.stream))
    ends_with_context = generation.prompt_tokens + body.max_tokens > endpoint.max_model_len
    if body.stream:
        stream = MessageStream(generation, endpoint.batcher, ends_with_context=ends_with_context)
        return await stream_of(request, endpoint, stream.chunks(endpoint.deltas(generation)), error_event)
    collected = await endpoint.open_requests.run(request.receive, collect(generation, endpoint.deltas(generation)))
    return json_response(whole_message(generation, collected, ends_with_context=ends_with_context))


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
async def count_tokens(request: Request, body: Annotated[CountRequest, Depends(body_of(CountRequest))]) -> Response:
    """Returns how many tokens a conversation has as the model would see it."""
    return json_response(TokenCountAnswer(len(await _prompt(endpoint_of(request), body, caller_of(request).request_id))))


async def _prompt(endpoint: Endpoint, body: CountRequest, request_id: str) -> list[int]:
    fields = endpoint.output_format.without_hints(chat_fields(body))
    try:
        return await chat_prompt(endpoint, ChatRequest.checked(fields), request_id)
    except InvalidRequest as error:
        raise _renamed(error) from None


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """Gives the fields of a chat that an error names this API's names."""
    param = error.param
    if param is None:
        return error
    for pattern, name in _OWN_NAMES:
        param = re.sub(pattern, name, param)
    return type(error)(error.message, param)
