"""What all routes share: the engine, the settings and the work in hand."""

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import cast

import structlog
from fastapi import Request
from starling_engine import AsyncEngine
from starling_engine.frontend.render_process import ChatRendering
from starling_engine.outputs import StreamDelta

from starling_agent.drain import Drain
from starling_agent.http.errors import ApiError
from starling_agent.http.open_work import OpenWork
from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.openai.generation import Generation, PromptDelta, merged
from starling_agent.openai.prompts import PromptReader
from starling_agent.openai.stream_batcher import StreamBatcher
from starling_agent.settings import ServerSettings

log = structlog.get_logger("starling.request")


class Endpoint:
    """One model behind one engine, under the names in `settings`, of which there is at least one.

    `work`, `metrics` and `exporter` are given where they outlive the engine; otherwise the endpoint has its own.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ServerSettings,
        drain: Drain,
        *,
        work: OpenWork | None = None,
        metrics: RequestMetrics | None = None,
        exporter: Exporter | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.drain = drain
        self.created = int(time.time())
        self.names = settings.served_model_names
        self.work = OpenWork() if work is None else work
        self.pace = StreamBatcher(engine.config.worker.device)
        self.metrics = RequestMetrics() if metrics is None else metrics
        self.vocab_size = engine.model_config.vocab_size
        self.max_model_len = engine.config.scheduler.max_model_len
        self.prompts = PromptReader(engine.tokenizer, self.vocab_size, self.max_model_len, settings.max_prompts)
        self.rendering = ChatRendering(engine.tokenizer.renderer, places=lambda: engine.places)
        cache = CacheShape(engine.config.block_size, engine.config.cache_dtype)
        self.exporter = exporter or Exporter(
            EngineCollector(lambda: engine.stats, self.names[0], cache, self.metrics, lambda: engine.sleep_level)
        )

    def open(self) -> None:
        """Once requests come."""
        self.rendering.open()

    def close(self) -> None:
        """Once none come any more."""
        self.rendering.close()

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ApiError(
                404,
                f"the model {asked[:200]!r} does not exist; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    def deltas(self, generation: Generation) -> AsyncGenerator[PromptDelta]:
        """Starts nothing yet: the engine gets the request when the first delta is asked for."""
        return merged([self._stream(generation, ids, f"{generation.answer_id}-{i}") for i, ids in enumerate(generation.prompts)])

    def _stream(self, generation: Generation, ids: list[int], engine_id: str) -> AsyncGenerator[StreamDelta]:
        stream = self.engine.stream(
            ids,
            generation.params,
            request_id=engine_id,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
        )
        return self.metrics.measured(stream)


def endpoint_of(request: Request) -> Endpoint:
    return cast("Endpoint", request.app.state.endpoint)


def own_id(request_id: str) -> str:
    """An id for an answer, in which the request's is found. That one may be the client's choice, and come twice."""
    return f"{request_id}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of a request besides its body.

    request_id  it came with it or was given it on arrival
    key_salt    keeps what is cached for its API key from others' requests; None: nothing does
    """

    request_id: str
    key_salt: str | None

    def cache_salt(self, asked: str | None) -> str | None:
        """The salt of its key, and the one that it asks for. Salts of keys are all of one length, so no two pairs are the same."""
        return asked if self.key_salt is None else f"{self.key_salt}:{asked or ''}"


def caller_of(request: Request) -> Caller:
    state = request.scope["state"]
    return Caller(state["request_id"], state.get("key_salt"))
