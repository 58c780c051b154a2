"""Endpoints /healthz, /readyz and /metrics. Healthy means that due work gets done, not only that a port answers."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starling_agent.contract.listening import listening_socket

from starling_operator import metrics

STUCK_SECONDS = 60.0


class OperatorHealth:
    """HTTP server of the probes. `unhealthy` and `unready` return what is wrong, or None."""

    def __init__(self, unhealthy: Callable[[], str | None], unready: Callable[[], str | None]) -> None:
        app = web.Application()
        app.router.add_get("/healthz", _probe(unhealthy))
        app.router.add_get("/readyz", _probe(unready))
        app.router.add_get("/metrics", _metrics)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, listening_socket(host, port)).start()

    async def close(self) -> None:
        await self._runner.cleanup()


def _probe(problem: Callable[[], str | None]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        found = problem()
        return web.Response(status=503 if found else 200, text=f"{found or 'ok'}\n")

    return answer


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(metrics.REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})
