"""The gRPC servers of the endpoint picker: one for gateways, and one that says how it is without TLS."""

import asyncio
from dataclasses import replace

import grpc
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from starlette.types import ASGIApp
from starling_agent.contract.listening import authority
from starling_agent.http.open_requests import ClientGone
from starling_engine.errors import ConfigError

from starling_router.epp import EppSettings
from starling_router.epp.certificate import self_signed
from starling_router.epp.stream import ExtProcStream, WrongMessage
from starling_router.upstream import SILENT_SECONDS

EXT_PROC = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
NAME = "starling-router"
READY_SERVICES = ("readiness", EXT_PROC)
"""Health services that say whether requests are to be sent here."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port that another process has is an error
    ("grpc.max_concurrent_streams", 1000),  # of one connection; a gateway opens another one
    # A gateway whose machine vanished would have its requests counted for hours.
    ("grpc.keepalive_time_ms", SILENT_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", SILENT_SECONDS * 500),
    ("grpc.http2.ping_timeout_ms", SILENT_SECONDS * 500),
    ("grpc.http2.max_pings_without_data", 0),
)
log = structlog.get_logger("starling.router")


class EppServer:
    """Serves an application whose requests are gateways'. Belongs to the event loop that it is made in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._gateways, self._probes = grpc.aio.server(options=_OPTIONS), grpc.aio.server(options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = False
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, self._gateways)
        for server in (self._gateways, self._probes):  # a gateway asks where it is served, a kubelet without TLS
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self, host: str, settings: EppSettings) -> EppSettings:
        """Serves. Returns the settings with the ports, of which 0 takes a free one. Raises ConfigError for one that is taken."""
        credentials = grpc.ssl_server_credentials([self_signed(NAME)]) if settings.secure else None
        gateways = _bind(self._gateways, host, settings.gateways, "epp_port", credentials)
        bound = replace(settings, gateways=gateways, health=_bind(self._probes, host, settings.health, "epp_health_port"))
        await self._gateways.start()
        await self._probes.start()
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self._set_ready(health_pb2.HealthCheckResponse.NOT_SERVING)
        return bound

    async def begin_ready(self) -> None:
        """Says that requests are to be sent here, now that endpoints are known, unless it has said that it ends."""
        if not self._ends:
            await self._set_ready(health_pb2.HealthCheckResponse.SERVING)

    def end_ready(self) -> None:
        """Says that requests are to be sent elsewhere. Those that come are served still."""
        self._ends = True
        task = asyncio.get_running_loop().create_task(self._set_ready(health_pb2.HealthCheckResponse.NOT_SERVING))
        self._tasks.add(task)  # the loop has only weak references
        task.add_done_callback(self._tasks.discard)

    async def _set_ready(self, status: int) -> None:
        for service in READY_SERVICES:
            await self._health.set(service, status)

    async def close(self, seconds: float, over: asyncio.Event) -> None:
        """Ends when the open requests have ended, after so many seconds, or when it is `over`, which ends them."""
        ended, cut = asyncio.ensure_future(self._gateways.stop(seconds)), asyncio.ensure_future(over.wait())
        await asyncio.wait((ended, cut), return_when=asyncio.FIRST_COMPLETED)
        cut.cancel()
        await self._gateways.stop(0)
        await ended
        await self._probes.stop(0)

    async def Process(self, _: object, context: "grpc.aio.ServicerContext") -> None:
        """Serves one request of a gateway, to the end of its answer."""
        stream = ExtProcStream(context)
        try:
            scope = await stream.begin()
        except ClientGone:
            return
        except WrongMessage as error:
            log.error("a gateway is not set up for this endpoint picker", cause=str(error))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        await self._app(scope, stream.receive, stream.send)


def _bind(server: "grpc.aio.Server", host: str, port: int, field: str, credentials: "grpc.ServerCredentials | None" = None) -> int:
    address = authority(host, port)
    try:
        if credentials is not None:
            return int(server.add_secure_port(address, credentials))
        return int(server.add_insecure_port(address))
    except RuntimeError:
        raise ConfigError(f"{address} cannot be listened on", field) from None
