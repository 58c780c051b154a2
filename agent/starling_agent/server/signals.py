"""The end of a server after a signal: unready at once, then closed to new requests, then finished."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from starling_agent.drain import Drain
from starling_agent.http.open_requests import OpenRequests
from starling_agent.server.http_server import HttpServer
from starling_agent.settings import ServerSettings

UNFINISHED_EXIT_CODE = 1
SHUTDOWN_MESSAGE = "the server is shutting down; send the request again"
log = structlog.get_logger("starling.server")


class SignalShutdown:
    """Handles SIGTERM and SIGINT for one running server.

    SIGTERM comes from a platform whose load balancers still send requests for some seconds. SIGINT comes from a person at the
    keyboard: only requests that run are waited for. A second signal of either kind ends everything at once.

    `on_begin` is called at the first, and `on_closed` when no new request is accepted any more. `on_over` is called when requests
    that have not begun are no longer waited for: with SIGINT at once, else at the end of the drain.
    """

    def __init__(
        self,
        server: HttpServer,
        settings: ServerSettings,
        drain: Drain,
        open_requests: OpenRequests,
        on_begin: Callable[[], None] = lambda: None,
        on_over: Callable[[], None] = lambda: None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.exit_code = 0
        self.drain_over = asyncio.Event()
        """Set once open requests are no longer waited for."""
        self._server = server
        self._settings = settings
        self._drain_state = drain
        self._open_requests = open_requests
        self._on_begin, self._on_over, self._on_closed = on_begin, on_over, on_closed
        self._signals = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self._on_begin()
            if number == signal.SIGINT:
                self._server.awaits_requests = False
                self._on_over()
            self._begin(self._drain(self._settings.accept_seconds if number == signal.SIGTERM else 0.0))
        elif self._signals == 2:
            self.end_now()

    def end_now(self) -> None:
        """Ends the server without waiting for open requests."""
        self._begin(self._end_now())

    def _begin(self, ending: Coroutine[Any, Any, None]) -> None:
        # The loop has only weak references to tasks; a drain that is garbage-collected would never end.
        task = asyncio.get_running_loop().create_task(ending)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, accept_seconds: float) -> None:
        self._drain_state.draining = True
        seconds = self._settings.drain_seconds
        log.info("draining", accept_seconds=accept_seconds, drain_seconds=seconds, open=len(self._open_requests))
        time = asyncio.get_running_loop().time
        ends = time() + accept_seconds + seconds
        await asyncio.sleep(accept_seconds)
        await self._accept_late(accept_seconds, ends - seconds / 2)
        log.info("closed", open=len(self._open_requests))
        self._server.should_exit = True
        self._on_closed()
        await asyncio.sleep(ends - time())
        await self._end_now()

    async def _accept_late(self, accept_seconds: float, until: float) -> None:
        """Waits until no request has come for `accept_seconds`: a balancer that lags more than was thought still sends some.

        What is left of the drain behind `until` is for those.
        """
        time = asyncio.get_running_loop().time
        while (late := min(self._open_requests.last_at + accept_seconds, until) - time()) > 0:  # noqa: ASYNC110 - more may come
            await asyncio.sleep(late)

    async def _end_now(self) -> None:
        """Sends every open request an error, in its stream if that has begun; then stops the server."""
        self.drain_over.set()
        self._on_over()
        unfinished = len(self._open_requests)
        self._drain_state.draining = True
        self._open_requests.end_all(SHUTDOWN_MESSAGE)
        self._server.should_exit = True
        self._server.end_waiting()
        if unfinished:
            self.exit_code = UNFINISHED_EXIT_CODE
            log.warning("ended with requests open", open=unfinished)
        await asyncio.sleep(2.0)
        self._server.force_exit = True
