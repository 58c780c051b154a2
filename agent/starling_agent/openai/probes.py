"""Paths of probes and monitoring, which need no API key, and those for routers, which do: /backend and what is below it."""

import sys

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from starling_engine.delta import Stats
from starling_engine.errors import EngineDead
from starling_engine.frontend.cores import CoreClients
from starling_engine.sleep import ASLEEP

from starling_agent.contract.backend import BackendLoad, BackendProof, BackendState
from starling_agent.contract.router import PROOF_PATH, token_proof
from starling_agent.http.auth import is_of_router
from starling_agent.http.errors import ApiError, asleep, invalid
from starling_agent.openai.answering import json_response
from starling_agent.openai.cache_stream import CacheStream
from starling_agent.openai.endpoint import Endpoint, endpoint_of
from starling_agent.version import starling_version

router = APIRouter(tags=["probes"])


class ProbeStatus(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    server_load: int


@router.get("/health")
async def health(request: Request) -> Response:
    """Answers 200 while the engine makes progress or has nothing to do; 503 with the cause when it died or hangs."""
    endpoint_of(request).engine.check_health()
    return json_response(ProbeStatus("ok"))


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """Answers as /health, under SageMaker's name for it."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Response:
    """Returns the number of requests that run or wait, in vLLM's form."""
    stats = endpoint_of(request).engine.stats
    return json_response(ServerLoad(stats.running + stats.waiting))


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answers 200 while the server accepts requests: it is healthy, awake, and does not drain."""
    _check_ready(endpoint_of(request))
    return json_response(ProbeStatus("ready"))


def _check_ready(endpoint: Endpoint) -> None:
    if endpoint.drain.draining:
        raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
    endpoint.engine.check_health()
    if not endpoint.engine.is_awake:
        raise asleep(ASLEEP)


@router.get("/backend")
async def backend(request: Request) -> Response:
    """Returns what a router wants to know of this server."""
    endpoint = endpoint_of(request)
    try:
        _check_ready(endpoint)
        ready = True
    except (ApiError, EngineDead):
        ready = False
    settings, stats, config = endpoint.settings, endpoint.engine.stats, endpoint.engine.config
    salted, cores = settings.prefix_cache_salt == "key", len(endpoint.engine.cores.serving)
    has_routers = settings.router_token is not None
    state = BackendState(
        pod=settings.pod,
        group=settings.group,
        revision=settings.revision,
        ready=ready,
        open=stats.running + stats.waiting,
        models=list(endpoint.names),
        block_size=config.block_size,
        salted=salted and bool(settings.api_keys),
        shows_cache=has_routers,
        prompting=endpoint.bundles.digest if has_routers else "",
        tenants=salted and has_routers,
        room=-stats.waiting if stats.waiting else cores * config.scheduler.max_num_seqs - stats.running,
        step_tokens=stats.step_tokens,
        kv_free=_kv_free(endpoint.engine.cores, stats),
        load=_load(stats),
    )
    return json_response(state.model_dump())


def _kv_free(cores: CoreClients, stats: Stats) -> int | None:
    """Returns the part of the longest sequence for which blocks are free; None where a state has room for any length."""
    if not (cores.any_serving and stats.kv_blocks) or cores.kv_tokens == sys.maxsize:
        return None
    return cores.kv_tokens * (stats.kv_blocks - stats.kv_blocks_used) // stats.kv_blocks


def _load(stats: Stats) -> BackendLoad:
    return BackendLoad(
        running=stats.running,
        waiting=stats.waiting,
        kv_blocks=stats.kv_blocks,
        kv_blocks_used=stats.kv_blocks_used,
        prompt_tokens_total=stats.prompt_tokens_total,
        generated_tokens_total=stats.generated_tokens_total,
        prefix_queries_total=stats.prefix_queries_total,
        prefix_hits_total=stats.prefix_hits_total + stats.external_hits_total,
    )


@router.get(PROOF_PATH)
async def backend_proof(request: Request) -> Response:
    """Proves for ?nonce=TEXT that this server knows its routers' token. It needs no key, and says nothing of the token."""
    nonce, token = request.query_params.get("nonce", ""), endpoint_of(request).settings.router_token
    if not 16 <= len(nonce) <= 128:
        raise invalid("must have 16 to 128 characters", "nonce")
    value = b"" if token is None else token.value
    return json_response(BackendProof(proof=token_proof(value, nonce.encode()) if value else "").model_dump())


class GzipResponse(Response):
    """A file by gzip; an answer whose Content-Encoding is gzip is of another type."""

    media_type = "application/gzip"


@router.get("/backend/prompting", response_class=GzipResponse)
async def backend_prompting(request: Request) -> Response:
    """Returns how this server makes tokens of prompts, as JSON by gzip: its tokenizer, templates and limits."""
    bundle = await endpoint_of(request).bundles.made()
    return GzipResponse(bundle.data, headers={"ETag": f'"{bundle.digest}"'})


@router.get("/backend/cache", response_class=CacheStream, status_code=200)
async def backend_cache(request: Request) -> Response:
    """Streams what the engine cores have cached, as lines of JSON: all at first, then what changes. It needs the routers' token.

    Who asks the server a question of its own may learn what others asked: API keys do not suffice.
    """
    if not is_of_router(request.scope):
        raise ApiError(403, "what is cached is told to routers alone, by their token", code="routers_only")
    return CacheStream(endpoint_of(request))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns all metrics in Prometheus' text format."""
    exporter = endpoint_of(request).exporter
    return Response(exporter.render(), headers={"Content-Type": exporter.content_type})


@router.get("/version")
async def version() -> Response:
    """Returns the release of Starling."""
    return json_response(Version(starling_version()))
