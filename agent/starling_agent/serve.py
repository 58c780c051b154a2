"""`starling serve` in one process: starts the engine, serves until a signal, shuts the engine down."""

import asyncio
import contextlib
import dataclasses
import signal
from collections.abc import Callable
from typing import Protocol

import structlog
from starling_engine import AsyncEngine, EngineArgs
from starling_engine.core.messages import Loading
from starling_engine.errors import EngineDead

from starling_agent.drain import Drain
from starling_agent.http.open_requests import OpenRequests
from starling_agent.openai.app import create_app
from starling_agent.openai.endpoint import Endpoint
from starling_agent.openai.responses.background import background_responses
from starling_agent.server.http_server import BACKLOG, HttpServer, bind
from starling_agent.server.process_memory import collect_rarely, give_large_blocks_back
from starling_agent.server.signals import SignalShutdown
from starling_agent.settings import ServerSettings

DEAD_EXIT_CODE = 1
log = structlog.get_logger("starling.server")


class StartDisplay(Protocol):
    """Shows a person what happens while the server starts."""

    def phase(self, loading: Loading) -> None: ...

    def serving(self, endpoint: Endpoint, port: int) -> None: ...


class StoppedWhileLoading(Exception):
    """A signal came before the engine was ready."""


async def serve(args: EngineArgs, settings: ServerSettings, display: StartDisplay) -> int:
    """Returns the exit code: 0 when every request was finished. Raises StarlingError when the engine cannot start."""
    give_large_blocks_back()
    listener = bind(settings.host, settings.port)
    with contextlib.closing(listener), contextlib.ExitStack() as closing:
        open_requests = OpenRequests()
        background = background_responses(settings, open_requests)
        engine = await _start_engine(args, display.phase)
        try:
            named = dataclasses.replace(settings, served_model_names=settings.served_model_names or (args.model,))
            endpoint = Endpoint(engine, named, Drain(), open_requests, background)
            closing.callback(endpoint.close)
            endpoint.open()
            server = HttpServer(
                create_app(endpoint), None, named.read_seconds, named.connection_seconds, endpoint.metrics.responses
            )
            shutdown = SignalShutdown(server, named, endpoint.drain, open_requests)
            shutdown.listen()
            watch = asyncio.create_task(_report_death(engine))
            collect_rarely()
            # From here on the system accepts connections, also before uvicorn does.
            listener.listen(BACKLOG)
            display.serving(endpoint, listener.getsockname()[1])
            await server.serve(sockets=[listener])
            await background.finish(shutdown.drain_over)
            watch.cancel()
            exit_code = shutdown.exit_code if _is_alive(engine) else DEAD_EXIT_CODE
        finally:
            await engine.shutdown()
    log.info("ended", exit_code=exit_code)
    return exit_code


async def _start_engine(args: EngineArgs, on_phase: Callable[[Loading], None]) -> AsyncEngine:
    """Starts the engine. Raises StoppedWhileLoading after a signal, when the core has ended too."""
    loop = asyncio.get_running_loop()
    start = asyncio.ensure_future(AsyncEngine.start(args, on_phase))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, start.cancel)
    try:
        return await start
    except asyncio.CancelledError:
        raise StoppedWhileLoading from None


def _is_alive(engine: AsyncEngine) -> bool:
    try:
        engine.check_health()
    except EngineDead:
        return False
    return True


async def _report_death(engine: AsyncEngine) -> None:
    """Logs the cause once; /health reports it from then on."""
    while True:
        await asyncio.sleep(1.0)
        try:
            engine.check_health()
        except EngineDead as error:
            log.error("the engine is dead", cause=str(error))
            return
