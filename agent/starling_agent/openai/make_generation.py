"""Makes a Generation of a chat or completion request, whose fields it checks."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from msgspec import structs
from starling_engine import BeamSearchParams, SamplingParams
from starling_engine.errors import InvalidRequest

from starling_agent.openai.bad_words import banned_tokens
from starling_agent.openai.endpoint import Caller, Endpoint
from starling_agent.openai.field_names import errors_named
from starling_agent.openai.generation import Generation
from starling_agent.openai.output_format import OutputReading
from starling_agent.openai.prompts import output_budget
from starling_agent.openai.protocol.beam_search import beam_search_params, check_beam_fields
from starling_agent.openai.protocol.sampling import SamplingFields
from starling_agent.openai.protocol.structured_outputs import Form
from starling_agent.openai.stream_record import Note, StreamRecord

MAX_PROMPT_LOGPROBS = 300_000
"""Entries in all choices of an answer; each is some 60 bytes."""


async def make_generation(
    endpoint: Endpoint,
    body: SamplingFields,
    *,
    kind: str,
    caller: Caller,
    prompts: list[list[int]],
    prefixes: list[str],
    default_max_tokens: int | None,
    clamps: bool = False,
    logprobs: int | None,
    prompt_logprobs: int | None,
    only_echo: bool = False,
    prediction: list[int] | None = None,
    reading: OutputReading | None = None,
    form: Form | None = None,
    renamed: Mapping[str, str],
) -> Generation:
    """Raises InvalidRequest. `renamed` maps the engine's names of fields to those of this route.

    `default_max_tokens` is the route's; a recommendation of the model's authors takes precedence. `form` is what outputs have to
    have. `clamps`: what the context has no room for is left out of the limit.
    """
    check_beam_fields(body)
    defaults = endpoint.engine.model_config.generation_defaults
    name, requested = body.output_limit()
    default = int(defaults["max_tokens"]) if "max_tokens" in defaults else default_max_tokens
    if clamps and requested is not None and requested > 0:
        requested, default = None, requested
    budget = output_budget(prompts, 1 if only_echo else requested, default, endpoint.max_model_len, name)
    params = _params(endpoint, body, prompts, budget, logprobs, prompt_logprobs)
    if reading is not None and isinstance(params, SamplingParams):
        params = structs.replace(params, shown_token_ids=endpoint.output_format.shown_ids(reading))
    if form is not None and isinstance(params, SamplingParams):
        params = structs.replace(params, structured_outputs=form.params())
    names = {**renamed, "max_tokens": name, "beam_width": "n", **(form.renamed if form else {})}
    with errors_named(names):  # before any prompt starts: a later error could end a stream in the middle
        endpoint.engine.validate(prompts, params)
    _check_answer_size(prompts, prompt_logprobs, params.n)
    _check_sequences(endpoint, prompts, params)
    if isinstance(params, SamplingParams):
        with errors_named(names):
            await endpoint.engine.check_structured_outputs(prompts, params)
    options = body.stream_options
    generation = Generation(
        answer_id=caller.answer_id(kind, body.request_id),
        created=int(time.time()),
        model=endpoint.model_name(body.model),
        prompts=prompts,
        params=params,
        prefixes=prefixes,
        priority=_priority(endpoint, body.priority, caller),
        cache_salt=caller.cache_salt(body.cache_salt),
        top_logprobs=logprobs,
        only_echo=only_echo,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        return_token_ids=bool(body.return_token_ids),
        prediction=prediction if prediction is None else prediction[: endpoint.max_model_len],
        reading=reading,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        renamed=names,
    )
    return generation if caller.notes is None else _with_record(endpoint, generation, caller.notes)


def _with_record(endpoint: Endpoint, generation: Generation, notes: Sequence[Note]) -> Generation:
    """Makes a generation's stream resumable, and goes on with what `notes` say of it. Raises InvalidRequest for wrong ones."""
    params = generation.params
    if isinstance(params, BeamSearchParams) or params.prompt_logprobs is not None or generation.only_echo:
        return generation
    seeds = [endpoint.engine.draw_seed() if params.seed is None else params.seed for _ in generation.prompts]
    begun = notes[0].stream if notes else None
    if begun is None:
        return dataclasses.replace(generation, record=StreamRecord.of(notes, seeds, params.n, endpoint.vocab_size))
    record = StreamRecord.of(notes, begun.seeds, params.n, endpoint.vocab_size)
    if len(record.seeds) != len(generation.prompts):
        raise InvalidRequest("these notes are not of this request", "notes")
    return dataclasses.replace(generation, record=record, answer_id=begun.id, created=begun.created)


def _params(
    endpoint: Endpoint,
    body: SamplingFields,
    prompts: list[list[int]],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams | BeamSearchParams:
    if not body.use_beam_search:
        return body.sampling(
            endpoint.engine.model_config.generation_defaults,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            banned_words=banned_tokens(body.bad_words or (), endpoint.tokenizer),
        )
    if prompt_logprobs is not None:
        raise InvalidRequest("echo: log probabilities of the prompt do not go with use_beam_search", "echo")
    room = endpoint.max_model_len - max(map(len, prompts))
    return beam_search_params(body, room if max_tokens is None else max_tokens, logprobs)


def _check_answer_size(prompts: list[list[int]], prompt_logprobs: int | None, n: int) -> None:
    """Raises InvalidRequest for an answer with too many prompt scores, which would delay all other streams."""
    if prompt_logprobs is None:
        return
    entries = sum(map(len, prompts)) * n * (prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{entries} log probabilities of prompts were asked for; at most {MAX_PROMPT_LOGPROBS} are possible in one answer",
            "prompt_logprobs",
        )


def _check_sequences(endpoint: Endpoint, prompts: list[list[int]], params: SamplingParams | BeamSearchParams) -> None:
    """Raises InvalidRequest for more outputs than a core runs and queues: it gets all at once, so another try would fail too."""
    # Each step of a beam search sends the beams anew, with all their tokens.
    output, parts = (params.max_tokens, "prompts and max_tokens") if isinstance(params, BeamSearchParams) else (0, "prompts")
    count, tokens = len(prompts) * params.n, sum(len(prompt) + output for prompt in prompts) * params.n
    scheduler = endpoint.engine.config.scheduler
    limit, most = scheduler.max_num_seqs + scheduler.max_num_waiting, scheduler.max_num_waiting_tokens
    if count > limit:
        raise InvalidRequest(f"{count} outputs (prompts times n) were asked for; at most {limit} are possible at once", "n")
    if count > 1 and tokens > most:
        raise InvalidRequest(f"{tokens} tokens ({parts} times n) were sent; at most {most} are possible at once", "prompt")


def _priority(endpoint: Endpoint, priority: int | None, caller: Caller) -> int:
    """Returns the engine's priority, of which a lower one runs earlier. A tenant's takes the place of what a request asks for.

    In order of arrival, that of a tenant's only request is below 0.
    """
    by_priority = endpoint.engine.config.scheduler.policy == "priority"
    if priority and not by_priority:
        raise InvalidRequest("this server runs requests in order of arrival (--scheduling-policy fcfs)", "priority")
    if caller.priority is not None:
        return -caller.priority if by_priority else -caller.is_lone
    return priority or 0
