"""GET /health, /ping, /ready, /load, /metrics and /version: for machines that watch; open without a key."""

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from starling_engine.sleep import ASLEEP

from starling_agent.http.errors import ApiError, asleep
from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import endpoint_of
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
    """200 while the engine makes progress (or has nothing to do); 503 with the reason when it died or hangs."""
    endpoint_of(request).engine.check_health()
    return json_response(ProbeStatus("ok"))


@router.api_route("/ping", methods=["GET", "POST"])
async def ping(request: Request) -> Response:
    """As /health, by the name that SageMaker asks for."""
    return await health(request)


@router.get("/load")
async def load(request: Request) -> Response:
    """How many requests run or wait here, as vLLM tells it."""
    stats = endpoint_of(request).engine.stats
    return json_response(ServerLoad(stats.running + stats.waiting))


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are welcome: healthy, awake, and not about to end."""
    endpoint = endpoint_of(request)
    if endpoint.drain.draining:
        raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
    endpoint.engine.check_health()
    if not endpoint.engine.is_awake:
        raise asleep(ASLEEP)
    return json_response(ProbeStatus("ready"))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    exporter = endpoint_of(request).exporter
    return Response(exporter.render(), headers={"Content-Type": exporter.content_type})


@router.get("/version")
async def version() -> Response:
    """The release that runs."""
    return json_response(Version(starling_version()))
