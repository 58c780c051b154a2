"""POST /v1/completions"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from starling_engine.frontend.prompt_encoder import PromptForm
from starling_engine.outputs import TokenLogprobs

from starling_agent.openai.answering import answer_stream, answer_whole, log_request
from starling_agent.openai.chunks import COMPLETION
from starling_agent.openai.collecting import Choice, Collected
from starling_agent.openai.endpoint import Caller, Endpoint, caller_of, endpoint_of
from starling_agent.openai.generation import Generation
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.make_generation import make_generation
from starling_agent.openai.protocol.answers import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs
from starling_agent.openai.protocol.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from starling_agent.openai.request_body import body_of, body_schema

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def completions(
    request: Request, body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest, resumable=True))]
) -> Response:
    """Continues one or several prompts, whole or as a stream of server-sent events."""
    endpoint = endpoint_of(request)
    generation = await completion_generation(endpoint, body, caller_of(request))
    log_request(endpoint, generation, bool(body.stream))
    if body.stream:
        return await answer_stream(request, endpoint, generation, COMPLETION)
    return await answer_whole(request, endpoint, generation, lambda c: completion_answer(endpoint, generation, c))


async def completion_generation(endpoint: Endpoint, body: CompletionRequest, caller: Caller) -> Generation:
    endpoint.model_name(body.model)
    body.check_stream_fields()
    body.check_best_of()
    prompts = await endpoint.prompts.read(body.prompt, "prompt", PromptForm(body.add_special_tokens is not False))
    return await make_generation(
        endpoint,
        body,
        kind="cmpl",
        caller=caller,
        prompts=prompts,
        prefixes=_prompt_texts(endpoint, body, prompts) if body.echo else [""] * len(prompts),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.num_prompt_logprobs(),
        only_echo=body.only_echo,
        form=body.form(),
        renamed={},
    )


def _prompt_texts(endpoint: Endpoint, body: CompletionRequest, prompts: list[list[int]]) -> list[str]:
    """Returns the prompts' texts; prompts of token ids are decoded."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    texts = [item if isinstance(item, str) else None for item in body.prompt]
    given = texts if len(texts) == len(prompts) and None not in texts else [None] * len(prompts)
    return [
        endpoint.tokenizer.decode(ids, skip_special_tokens=False) if text is None else text
        for text, ids in zip(given, prompts, strict=True)
    ]


def completion_answer(endpoint: Endpoint, generation: Generation, collected: Collected) -> Completion:
    writer = LogprobWriter(endpoint.tokenizer, generation.tokens_as_ids)
    scores = [
        _PromptScore.of(ids, collected.prompt_logprobs.get(i), generation.top_logprobs, writer)
        for i, ids in enumerate(generation.prompts)
    ]
    return Completion(
        id=generation.answer_id,
        created=generation.created,
        model=generation.model,
        choices=[_choice(choice, generation, scores[choice.prompt], writer) for choice in collected.choices],
        usage=collected.usage,
    )


@dataclass(frozen=True, slots=True)
class _PromptScore:
    """A prompt's log probabilities in both forms that answers have; made once for all its choices."""

    by_token: PromptLogprobs | None
    echoed: CompletionLogprobs | None

    @classmethod
    def of(
        cls, ids: list[int], tables: list[TokenLogprobs | None] | None, top: int | None, writer: LogprobWriter
    ) -> "_PromptScore":
        echoed = writer.completion(ids, tables, top, 0) if tables is not None and top is not None else None
        return cls(writer.prompt(tables), echoed)


def _choice(choice: Choice, generation: Generation, score: _PromptScore, writer: LogprobWriter) -> CompletionChoice:
    prefix = generation.prefixes[choice.prompt]
    answer = CompletionChoice(
        index=choice.index,
        text=prefix + choice.parts.content,
        logprobs=_logprobs(choice, generation.top_logprobs, score.echoed if prefix else None, len(prefix), writer),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_logprobs=score.by_token,
    )
    if generation.return_token_ids:
        answer.token_ids = choice.token_ids
        answer.prompt_token_ids = generation.prompts[choice.prompt]
    return answer


def _logprobs(
    choice: Choice, top: int | None, echoed: CompletionLogprobs | None, offset: int, writer: LogprobWriter
) -> CompletionLogprobs | None:
    """Returns log probabilities of the echoed prompt, if any, and of the output, whose text begins at `offset`."""
    if top is None:
        return None
    output = writer.completion(choice.token_ids, choice.logprobs, top, offset)
    if echoed is None:
        return output
    return CompletionLogprobs(
        echoed.tokens + output.tokens,
        echoed.token_logprobs + output.token_logprobs,
        echoed.top_logprobs + output.top_logprobs,
        echoed.text_offset + output.text_offset,
    )
