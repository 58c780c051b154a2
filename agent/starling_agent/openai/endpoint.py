"""The endpoint, which all routes share: engine, settings, open requests and metrics."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import structlog
from fastapi import Request
from starling_engine import AsyncEngine, BeamSearchParams
from starling_engine.frontend.cross_encoder import pair_scorer
from starling_engine.frontend.pooled_texts import PooledTexts
from starling_engine.outputs import OutputDelta, StreamDelta

from starling_agent.drain import Drain
from starling_agent.http.open_requests import OpenRequests
from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai.generation import Generation, PromptDelta, merged
from starling_agent.openai.prompting import Prompting
from starling_agent.openai.prompting_bundle import PromptingBundles
from starling_agent.openai.responses.background import BackgroundResponses
from starling_agent.openai.stream_batcher import StreamBatcher
from starling_agent.openai.stream_record import Note
from starling_agent.settings import ServerSettings

log = structlog.get_logger("starling.request")


class Endpoint(Prompting):
    """One model with one engine.

    `background` belongs to `open_requests`. `metrics` and `exporter` are given if they outlive the engine; otherwise the endpoint
    makes them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        drain: Drain,
        open_requests: OpenRequests,
        background: BackgroundResponses,
        *,
        metrics: RequestMetrics | None = None,
        exporter: Exporter | None = None,
    ) -> None:
        scheduler, model = engine.config.scheduler, engine.model_config
        super().__init__(engine.tokenizer, settings, model.vocab_size, scheduler.max_model_len, lambda: engine.max_open_requests)
        self.engine = engine
        self.bundles = PromptingBundles(self)
        self.drain = drain
        self.created = int(time.time())
        self.open_requests = open_requests
        self.background = background
        self.responses = background.store
        self.batcher = StreamBatcher(engine.config.worker.device)
        self.metrics = RequestMetrics() if metrics is None else metrics
        self.pooled_texts = PooledTexts(self.prompts, self.rendering.render, model.pooler)
        self.pair_scorer = pair_scorer(self.prompts, self.rendering.render, model)
        cache = CacheShape(engine.config.block_size, engine.config.cache_dtype)
        self.exporter = exporter or Exporter(
            EngineCollector(lambda: engine.stats, self.names[0], cache, self.metrics, lambda: engine.sleep_level)
        )

    def deltas(self, generation: Generation) -> AsyncGenerator[PromptDelta]:
        """Returns the stream of deltas. The engine gets the request when the first one is awaited."""
        return merged([self._stream(generation, i) for i in range(len(generation.prompts))], generation.renamed)

    def _stream(self, generation: Generation, prompt: int) -> AsyncGenerator[StreamDelta]:
        ids, engine_id, params, record = (
            generation.prompts[prompt],
            f"{generation.answer_id}-{prompt}",
            generation.params,
            generation.record,
        )
        if isinstance(params, BeamSearchParams):
            return self.metrics.measured(self._search(generation, params, ids, engine_id))
        stream = self.engine.stream(
            ids,
            params if record is None else msgspec.structs.replace(params, seed=record.seeds[prompt]),
            request_id=engine_id,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            prediction=generation.prediction,
            earlier=None if record is None else record.earlier.get(prompt),
        )
        return self.metrics.measured(stream)

    async def _search(
        self, generation: Generation, params: BeamSearchParams, ids: list[int], engine_id: str
    ) -> AsyncIterator[StreamDelta]:
        """Yields all outputs of a beam search at once: the best are known at its end."""
        found = await self.engine.beam_search(
            ids, params, request_id=engine_id, priority=generation.priority, cache_salt=generation.cache_salt
        )
        yield StreamDelta(
            request_id=found.request_id,
            prompt_token_ids=found.prompt_token_ids,
            outputs=[
                OutputDelta(output.index, output.text, output.token_ids, output.logprobs, output.finish_reason)
                for output in found.outputs
            ],
            finished=True,
            num_cached_tokens=found.num_cached_tokens,
            queue_seconds=found.queue_seconds,
            first_token_seconds=found.first_token_seconds,
        )


def endpoint_of(request: Request) -> Endpoint:
    return cast("Endpoint", request.app.state.endpoint)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    request_id  id that the client gave, or that was made on arrival
    key_salt    separates the cached prefixes of its API key from others'; None: they are shared
    owner       stands for its API key; None: the endpoint is open
    priority    of its tenant, a higher one first; None: no router has named one
    is_lone     its tenant has no other request open
    notes       of its stream by another server, which begins it if there are none; None: the stream is not resumable
    """

    request_id: str
    key_salt: str | None
    owner: str | None = None
    notes: Sequence[Note] | None = None
    priority: int | None = None
    is_lone: bool = False

    def answer_id(self, kind: str, given: str | None) -> str:
        """Makes an answer's id, with the request's in it: clients may choose that one (`given`), and use it twice."""
        return f"{kind}-{given or self.request_id}-{uuid.uuid4().hex[:8]}"

    def cache_salt(self, given: str | None) -> str | None:
        """Joins the salt of the key and the request's own. Salts of keys have one length, so different pairs differ."""
        return given if self.key_salt is None else f"{self.key_salt}:{given or ''}"


def caller_of(request: Request) -> Caller:
    state = request.scope["state"]
    salt, owner, notes = state.get("key_salt"), state.get("key_owner"), state.get("notes")
    return Caller(state["request_id"], salt, owner, notes, state.get("priority"), state.get("is_lone", False))
