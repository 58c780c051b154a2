"""POST /v1/messages and /v1/messages/count_tokens"""

import itertools
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from starling_agent.openai.answering import json_response, log_request, stream_generation
from starling_agent.openai.anthropic.answers import MessageStream, TokenCountAnswer, whole_message
from starling_agent.openai.anthropic.conversion import chat_fields, sampling_fields
from starling_agent.openai.anthropic.protocol import CountRequest, MessagesRequest
from starling_agent.openai.chat_generation import chat_generation, chat_prompt
from starling_agent.openai.collecting import collect
from starling_agent.openai.endpoint import caller_of, endpoint_of
from starling_agent.openai.field_names import TOOL_NAMES, OwnName, fields_named
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["Anthropic"])
_OWN_NAMES = (
    OwnName(r"^max_completion_tokens$", "max_tokens"),
    OwnName(r"^stop$", "stop_sequences"),
    OwnName(r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    *TOOL_NAMES,
    OwnName(r"^response_format.*", "output_config.format.schema"),
    OwnName(r"^reasoning_effort$", "thinking"),
    OwnName(r"^thinking_token_budget$", "thinking.budget_tokens"),
)
"""This API's names for a chat's fields, but for its messages."""


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def messages(
    request: Request, body: Annotated[MessagesRequest, Depends(body_of(MessagesRequest, resumable=True))]
) -> Response:
    """Answers a conversation, whole or as a stream of events."""
    endpoint, caller = endpoint_of(request), caller_of(request)
    chat, names_of_messages = chat_fields(body)
    fields = endpoint.output_format.without_hints(chat) | sampling_fields(body)
    with fields_named(itertools.chain(names_of_messages, _OWN_NAMES)):
        generation = await chat_generation(endpoint, ChatRequest.checked(fields), caller, kind="msg", lenient=True)
    generation = generation.with_names(_OWN_NAMES)
    log_request(endpoint, generation, bool(body.stream))
    ends_with_context = generation.prompt_tokens + body.max_tokens > endpoint.max_model_len
    shown = {"ends_with_context": ends_with_context, "omits_thinking": body.omits_thinking}
    if body.stream:
        stream = MessageStream(generation, endpoint.batcher, **shown)
        return await stream_generation(request, endpoint, generation, stream.chunks)
    collected = await endpoint.open_requests.run(request.receive, collect(generation, endpoint.deltas(generation)))
    return json_response(whole_message(generation, collected, **shown))


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
async def count_tokens(request: Request, body: Annotated[CountRequest, Depends(body_of(CountRequest))]) -> Response:
    """Returns how many tokens a conversation has as the model would see it."""
    endpoint = endpoint_of(request)
    chat, names_of_messages = chat_fields(body)
    fields = endpoint.output_format.without_hints(chat)
    with fields_named(itertools.chain(names_of_messages, _OWN_NAMES)):
        prompt = await chat_prompt(endpoint, ChatRequest.checked(fields), caller_of(request).request_id)
    return json_response(TokenCountAnswer(len(prompt)))
