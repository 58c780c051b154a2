"""POST /v1/chat/completions"""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from starling_agent.openai.answer_parts import ToolCall
from starling_agent.openai.answering import answer_stream, answer_whole, log_request
from starling_agent.openai.chat_generation import chat_generation
from starling_agent.openai.chunks import CHAT
from starling_agent.openai.collecting import Choice, Collected
from starling_agent.openai.endpoint import Endpoint, caller_of, endpoint_of
from starling_agent.openai.field_names import fields_named
from starling_agent.openai.generation import Generation
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.protocol.answers import (
    ChatChoice,
    ChatCompletion,
    ChatCustomToolCall,
    ChatMessage,
    ChatToolCall,
    CustomCall,
    FunctionCall,
)
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def chat_completions(
    request: Request, body: Annotated[ChatRequest, Depends(body_of(ChatRequest, resumable=True))]
) -> Response:
    """Answers a chat, whole or as a stream of server-sent events."""
    endpoint = endpoint_of(request)
    with fields_named(body.names_in_reasoning):
        generation = await chat_generation(endpoint, body.with_reasoning_fields(), caller_of(request))
    log_request(endpoint, generation, bool(body.stream))
    if body.stream:
        return await answer_stream(request, endpoint, generation, CHAT)
    return await answer_whole(request, endpoint, generation, lambda c: chat_answer(endpoint, generation, c))


def chat_answer(endpoint: Endpoint, generation: Generation, collected: Collected) -> ChatCompletion:
    writer = LogprobWriter(endpoint.tokenizer, generation.tokens_as_ids)
    answer = ChatCompletion(
        id=generation.answer_id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(choice, generation, writer) for choice in collected.choices],
        usage=collected.usage,
        prompt_logprobs=writer.prompt(collected.prompt_logprobs.get(0)),
    )
    if generation.return_token_ids:
        answer.prompt_token_ids = generation.prompts[0]
    return answer


def _message(choice: Choice, prefix: str) -> ChatMessage:
    parts = choice.parts
    message = ChatMessage((prefix + parts.content) or (None if parts.calls else ""))
    if parts.reasoning:
        message.reasoning = message.reasoning_content = parts.reasoning
    if parts.calls:
        message.tool_calls = [_tool_call(call) for call in parts.calls]
    return message


def _tool_call(call: ToolCall) -> ChatToolCall | ChatCustomToolCall:
    if call.is_custom:
        return ChatCustomToolCall(call.id, CustomCall(call.name, call.arguments))
    return ChatToolCall(call.id, FunctionCall(call.name, call.arguments))


def _choice(choice: Choice, generation: Generation, writer: LogprobWriter) -> ChatChoice:
    top = generation.top_logprobs
    answer = ChatChoice(
        index=choice.index,
        message=_message(choice, generation.prefixes[0]),
        logprobs=None if top is None else writer.chat(choice.token_ids, choice.logprobs, top),
        finish_reason=choice.ended_by,
        stop_reason=choice.stop_reason,
    )
    if generation.return_token_ids:
        answer.token_ids = choice.token_ids
    return answer
