"""POST /v1/chat/completions"""

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from starling_agent.openai.answering import answer_stream, answer_whole, log_request
from starling_agent.openai.chunks import CHAT
from starling_agent.openai.collecting import Choice, Collected
from starling_agent.openai.endpoint import Caller, Endpoint, caller_of, endpoint_of
from starling_agent.openai.generation import Generation
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.make_generation import make_generation
from starling_agent.openai.messages import assistant_text, predicted_text, template_messages
from starling_agent.openai.protocol.answers import ChatChoice, ChatCompletion, ChatMessage
from starling_agent.openai.protocol.chat import ChatRequest
from starling_agent.openai.rendering import render
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request, body: Annotated[ChatRequest, Depends(body_of(ChatRequest))]) -> Response:
    """Answers a chat, whole or as a stream of server-sent events."""
    endpoint = endpoint_of(request)
    generation = await chat_generation(endpoint, body, caller_of(request))
    log_request(endpoint, generation, bool(body.stream))
    if body.stream:
        return await answer_stream(request, endpoint, generation, CHAT)
    return await answer_whole(request, endpoint, generation, lambda c: chat_answer(endpoint, generation, c))


async def chat_generation(endpoint: Endpoint, body: ChatRequest, caller: Caller) -> Generation:
    endpoint.model_name(body.model)
    body.check_stream_fields()
    messages = template_messages(body.messages)
    prompt = await render(endpoint, body, messages, caller.request_id)
    ids = await endpoint.prompts.text(prompt, "messages", bool(body.add_special_tokens))
    prediction = predicted_text(body.prediction)
    return await make_generation(
        endpoint,
        body,
        kind="chatcmpl",
        caller=caller,
        prompts=[ids],
        prediction=None if prediction is None else await endpoint.prompts.encode(prediction, "prediction", False),
        prefixes=[assistant_text(messages[-1]) if body.echo else ""],
        default_max_tokens=None,
        logprobs=body.num_logprobs(),
        prompt_logprobs=body.prompt_logprobs,
        renamed={"logprobs": "top_logprobs", "prompt": "messages"},
    )


def chat_answer(endpoint: Endpoint, generation: Generation, collected: Collected) -> ChatCompletion:
    writer = LogprobWriter(endpoint.engine.tokenizer, generation.tokens_as_ids)
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


def _choice(choice: Choice, generation: Generation, writer: LogprobWriter) -> ChatChoice:
    top = generation.top_logprobs
    answer = ChatChoice(
        index=choice.index,
        message=ChatMessage(generation.prefixes[0] + choice.text),
        logprobs=None if top is None else writer.chat(choice.token_ids, choice.logprobs, top),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
    if generation.return_token_ids:
        answer.token_ids = choice.token_ids
    return answer
