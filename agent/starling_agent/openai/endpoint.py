"""The endpoint, which all routes share: engine, settings, open requests and metrics."""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import cast

import structlog
from fastapi import Request
from starling_engine import AsyncEngine, BeamSearchParams
from starling_engine.frontend.render_process import ChatRendering
from starling_engine.outputs import OutputDelta, StreamDelta

from starling_agent.drain import Drain
from starling_agent.http.errors import ApiError
from starling_agent.http.open_requests import OpenRequests
from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai.generation import Generation, PromptDelta, merged
from starling_agent.openai.output_format import OutputFormat
from starling_agent.openai.prompts import PromptReader
from starling_agent.openai.responses.store import ResponseStore
from starling_agent.openai.stream_batcher import StreamBatcher
from starling_agent.settings import ServerSettings

log = structlog.get_logger("starling.request")


class Endpoint:
    """One model with one engine, under the names in `settings`, of which there is at least one.

    `open_requests`, `metrics` and `exporter` are given if they outlive the engine; otherwise the endpoint makes them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        drain: Drain,
        *,
        open_requests: OpenRequests | None = None,
        metrics: RequestMetrics | None = None,
        exporter: Exporter | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.drain = drain
        self.created = int(time.time())
        self.names = settings.served_model_names
        self.open_requests = OpenRequests() if open_requests is None else open_requests
        self.batcher = StreamBatcher(engine.config.worker.device)
        self.metrics = RequestMetrics() if metrics is None else metrics
        self.vocab_size = engine.model_config.vocab_size
        self.max_model_len = engine.config.scheduler.max_model_len
        self.prompts = PromptReader(engine.tokenizer, self.vocab_size, self.max_model_len, settings.max_prompts)
        self.rendering = ChatRendering(engine.tokenizer.renderer, max_waiting=lambda: engine.max_open_requests)
        self.responses = ResponseStore(settings.max_stored_bytes)
        self.output_format = OutputFormat(
            engine.tokenizer,
            settings.tool_call_parser,
            settings.reasoning_parser,
            whole_calls=settings.whole_tool_calls,
        )
        cache = CacheShape(engine.config.block_size, engine.config.cache_dtype)
        self.exporter = exporter or Exporter(
            EngineCollector(lambda: engine.stats, self.names[0], cache, self.metrics, lambda: engine.sleep_level)
        )

    def open(self) -> None:
        """Starts what requests need. Called before the first one."""
        self.rendering.open()

    def close(self) -> None:
        """Stops it. Called after the last request."""
        self.rendering.close()

    def model_name(self, given: str | None) -> str:
        """Returns the name for the answer. Raises ApiError 404 for a model that is not served."""
        if given is None:
            return self.names[0]
        if given not in self.names:
            raise ApiError(
                404,
                f"the model {given[:200]!r} does not exist; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return given

    def deltas(self, generation: Generation) -> AsyncGenerator[PromptDelta]:
        """Returns the stream of deltas. The engine gets the request when the first one is awaited."""
        return merged([self._stream(generation, ids, f"{generation.answer_id}-{i}") for i, ids in enumerate(generation.prompts)])

    def _stream(self, generation: Generation, ids: list[int], engine_id: str) -> AsyncGenerator[StreamDelta]:
        if isinstance(generation.params, BeamSearchParams):
            return self.metrics.measured(self._search(generation, generation.params, ids, engine_id))
        stream = self.engine.stream(
            ids,
            generation.params,
            request_id=engine_id,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            prediction=generation.prediction,
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
        )


def endpoint_of(request: Request) -> Endpoint:
    return cast("Endpoint", request.app.state.endpoint)


def unique_id(request_id: str) -> str:
    """Returns an id for an answer that begins with the request's. Clients may choose that one, and use it twice."""
    return f"{request_id}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    request_id  id that the client gave, or that was made on arrival
    key_salt    separates the cached prefixes of its API key from others'; None: they are shared
    owner       stands for its API key; None: the endpoint is open
    """

    request_id: str
    key_salt: str | None
    owner: str | None = None

    def cache_salt(self, given: str | None) -> str | None:
        """Joins the salt of the key and the request's own. Salts of keys have one length, so different pairs differ."""
        return given if self.key_salt is None else f"{self.key_salt}:{given or ''}"


def caller_of(request: Request) -> Caller:
    state = request.scope["state"]
    return Caller(state["request_id"], state.get("key_salt"), state.get("key_owner"))
