"""GET /health, /ready, /metrics and /version: for machines that watch; open without a key."""

import msgspec
from fastapi import APIRouter, Request, Response
from starling_engine.sleep import ASLEEP

from starling_agent.openai.answering import json_response
from starling_agent.openai.endpoint import endpoint_of
from starling_agent.openai.errors import ApiError, asleep
from starling_agent.version import starling_version

router = APIRouter(tags=["probes"])


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine makes progress (or has nothing to do); 503 with the reason when it died or hangs."""
    endpoint_of(request).engine.check_health()
    return json_response(Status("ok"))


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are welcome: healthy, awake, and not about to end."""
    endpoint = endpoint_of(request)
    if endpoint.drain.draining:
        raise ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down")
    endpoint.engine.check_health()
    if not endpoint.engine.is_awake:
        raise asleep(ASLEEP)
    return json_response(Status("ready"))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    exporter = endpoint_of(request).exporter
    return Response(exporter.render(), headers={"Content-Type": exporter.content_type})


@router.get("/version")
async def version() -> Response:
    """The release that runs."""
    return json_response(Version(starling_version()))
