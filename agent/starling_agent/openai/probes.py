"""GET /health, /ping, /ready, /load, /metrics and /version: for probes and monitoring, without an API key."""

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
    """Answers 200 while the engine makes progress or has nothing to do; 503 with the cause when it died or hangs."""
    endpoint_of(request).engine.check_health()
    return json_response(ProbeStatus("ok"))


@router.api_route("/ping", methods=["GET", "POST"])
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
    endpoint = endpoint_of(request)
    if endpoint.drain.draining:
        raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
    endpoint.engine.check_health()
    if not endpoint.engine.is_awake:
        raise asleep(ASLEEP)
    return json_response(ProbeStatus("ready"))


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Returns all metrics in Prometheus' text format."""
    exporter = endpoint_of(request).exporter
    return Response(exporter.render(), headers={"Content-Type": exporter.content_type})


@router.get("/version")
async def version() -> Response:
    """Returns the release of Starling."""
    return json_response(Version(starling_version()))
