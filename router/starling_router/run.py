"""`starling router`: serves until a signal."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from starling_agent.server.http_server import BACKLOG, HttpServer, bind
from starling_agent.server.process_memory import collect_rarely
from starling_agent.server.signals import SignalShutdown
from starling_agent.settings import ServerSettings

from starling_router.discovery import BackendSources
from starling_router.epp import EppSettings
from starling_router.router import ServiceRouter

if TYPE_CHECKING:
    from starling_router.epp.server import EppServer


async def run_router(
    settings: ServerSettings,
    make_router: Callable[[], ServiceRouter],
    sources: BackendSources,
    serving: Callable[[int], None],
    epp_settings: EppSettings | None = None,
) -> int:
    """Serves in front of the backends that `sources` have, by a router that is made here. Returns the exit code.

    `serving` is called with the port once requests are accepted. With `epp_settings` gateways ask here for endpoints, too.
    """
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        router = make_router()
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(router.close)
            router.set_backends(sources.urls)
            epp = None
            if epp_settings is not None:
                epp = router.endpoint_picker(epp_settings.fallbacks)
                await epp.start(settings.host, epp_settings)

            def begin_end() -> None:
                router.end_polls()
                if epp is not None:
                    epp.end_ready()

            server = HttpServer(router.app, None, settings.read_seconds, settings.connection_seconds, router.responses)
            shutdown = SignalShutdown(server, settings, router.drain, router.open_requests, begin_end, router.end_holding)
            closing.push_async_callback(_ended, asyncio.create_task(router.find_backends(sources)))
            if epp is not None:
                closing.push_async_callback(_ended, asyncio.create_task(_begin_picking(router, epp)))
                # its held requests may wait for backends that are still to come
                closing.push_async_callback(epp.close, settings.drain_seconds, shutdown.drain_over)
            shutdown.listen()
            collect_rarely()
            listener.listen(BACKLOG)
            serving(listener.getsockname()[1])
            await server.serve(sockets=[listener])
        return shutdown.exit_code


async def _begin_picking(router: ServiceRouter, epp: "EppServer") -> None:
    await router.knows_backends()
    await epp.begin_ready()


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancels a task, and waits for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
