"""The HTTP answer of a generation: one JSON body, or a stream of events."""

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import structlog
from fastapi import Request, Response

from starling_agent.http.error_forms import error_event
from starling_agent.openai.chunks import ChoiceShape
from starling_agent.openai.collecting import Collected, collect
from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.event_stream import ErrorEvent, EventStream
from starling_agent.openai.generation import Generation, PromptDelta
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.stream_notes import StreamNotes
from starling_agent.openai.stream_record import RESUMABLE, YES
from starling_agent.openai.streaming import StreamEncoder

log = structlog.get_logger("starling.request")


async def answer_whole(
    request: Request, endpoint: Endpoint, generation: Generation, build: Callable[[Collected], msgspec.Struct]
) -> Response:
    """Answers with the whole generation; cancels it when the client disconnects."""
    collected = await endpoint.open_requests.run(request.receive, collect(generation, endpoint.deltas(generation)))
    return json_response(build(collected))


async def answer_stream(request: Request, endpoint: Endpoint, generation: Generation, shape: ChoiceShape) -> Response:
    """Answers with the generation's chunks as they come."""
    logprobs = LogprobWriter(endpoint.tokenizer, generation.tokens_as_ids)
    encoder = StreamEncoder(generation, shape, logprobs, endpoint.batcher)
    return await stream_generation(request, endpoint, generation, encoder.chunks)


async def stream_generation(
    request: Request,
    endpoint: Endpoint,
    generation: Generation,
    chunks: Callable[[AsyncGenerator[PromptDelta]], AsyncGenerator[bytes]],
) -> Response:
    """Answers with what `chunks` makes of the generation's deltas, and with a router's notes where these are wanted."""
    deltas = endpoint.deltas(generation)
    if generation.record is None:
        return await stream_of(request, endpoint, chunks(deltas))
    notes = StreamNotes(generation, generation.record)
    own_event = partial(error_event, scope=request.scope)
    noted = notes.write(chunks(notes.read(deltas)))
    return await stream_of(request, endpoint, noted, notes.error_event(own_event), {RESUMABLE: YES})


async def stream_of(
    request: Request,
    endpoint: Endpoint,
    chunks: AsyncGenerator[bytes],
    own_event: ErrorEvent | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Waits for the first event only: until then the engine may still refuse, and the answer needs another status."""

    async def first_chunk() -> bytes:
        return await anext(chunks)

    try:
        first = await endpoint.open_requests.run(request.receive, first_chunk())
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, endpoint.open_requests, headers, own_event)


def log_request(endpoint: Endpoint, generation: Generation, stream: bool) -> None:
    """Logs a request that is about to start, if so configured; its prompts only if that is configured too."""
    if not endpoint.settings.log_requests:
        return
    fields: dict[str, object] = {
        "id": generation.answer_id,
        "prompts": len(generation.prompts),
        "prompt_tokens": generation.prompt_tokens,
        "stream": stream,
        "params": _without_schemas(msgspec.to_builtins(generation.params)),
    }
    if endpoint.settings.log_prompts:
        fields["text"] = [endpoint.tokenizer.decode(ids, skip_special_tokens=False) for ids in generation.prompts]
    log.info("generation", **fields)


def _without_schemas(params: dict[str, Any]) -> dict[str, Any]:
    """Leaves only the names of `structured_outputs`' fields: a schema may be long, and is the caller's as a prompt is."""
    wanted = params.get("structured_outputs")
    return params if wanted is None else {**params, "structured_outputs": sorted(wanted)}


def json_response(answer: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
