"""uvicorn, with its socket bound early and its signals handled by `server.signals`."""

import asyncio
import contextlib
import errno
import functools
import socket
from collections import Counter
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from starling_engine.errors import ConfigError

from starling_agent.contract.listening import listening_socket
from starling_agent.server.connection import ClientConnection
from starling_agent.settings import READ_SECONDS, Tls

BACKLOG = 2048
TLS_CLOSE_SECONDS = 0.5
COMING_TURNS = 8
UNREAD_SECONDS = 60.0
"""A connection ends when its client has read none of the waiting data for this long."""


def bind(host: str, port: int, unread_seconds: float = UNREAD_SECONDS) -> socket.socket:
    """Binds before the model is loaded, so that a port in use is an error at once and not minutes later. Raises ConfigError."""
    try:
        bound = listening_socket(host, port)
    except OSError as error:
        field = "host" if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL else "port"
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another port or host", field) from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_seconds * 1000))
    return bound


class HttpServer(uvicorn.Server):
    """Ends when `should_exit` is set; then waits for open requests unless `force_exit` is set too.

    A header, and before it the TLS handshake, must come within `read_seconds`. For `connection_seconds` and `responses` see
    ClientConnection. Raises ConfigError for a certificate or key that cannot be used.
    """

    def __init__(
        self,
        app: ASGIApp,
        tls: Tls | None = None,
        read_seconds: float = READ_SECONDS,
        connection_seconds: float = 0.0,
        responses: "Counter[tuple[str, int]] | None" = None,
    ) -> None:
        self._read_seconds = read_seconds
        self.awaits_requests = True
        """False: when it ends, clients that have sent no request are not waited for."""
        super().__init__(
            uvicorn.Config(
                app,
                # An event loop runs already, and there is neither start-up work in the app nor a websocket route.
                loop="none",
                lifespan="off",
                ws="none",
                http=functools.partial(  # type: ignore[arg-type]  # a class would do no more
                    ClientConnection,
                    read_seconds=read_seconds,
                    connection_seconds=connection_seconds,
                    responses=Counter() if responses is None else responses,
                    awaits_requests=lambda: self.awaits_requests,
                ),
                access_log=False,
                log_config=None,
                backlog=BACKLOG,
                server_header=False,
                timeout_keep_alive=65,
                ssl_certfile=tls.cert_file if tls is not None else None,
                ssl_keyfile=tls.key_file if tls is not None else None,
            )
        )
        try:
            self.config.load()
        except OSError as error:  # ssl.SSLError is one
            assert tls is not None
            raise ConfigError(f"{tls.cert_file} and {tls.key_file} cannot be used: {error}", "tls_cert_file") from None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Does the same as uvicorn's for bound sockets, but limits the TLS handshake; asyncio gives it a minute."""
        config = self.config
        handshake = self._read_seconds if config.ssl is not None else None
        make = functools.partial(config.http_protocol_class, config=config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(make, sock=bound, ssl=config.ssl, ssl_handshake_timeout=handshake, backlog=BACKLOG)
            for bound in sockets or ()
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes behind those that have come: a connection that waits to be accepted would be reset, and a sent request lost."""
        await _let_come()
        for server in self.servers:
            server.close()
        self.servers = []  # uvicorn would wait for them; from Python 3.12 on they end with their last connection, even if forced
        await _let_come()
        if self.config.ssl is None:
            await super().shutdown(sockets)
            return
        closing = asyncio.create_task(self._abort_closing())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    def end_waiting(self) -> None:
        """Waits no longer for clients that have sent no request."""
        self.awaits_requests = False
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _abort_closing(self) -> None:
        """Aborts TLS connections that close: they wait half a minute for a close_notify, which an idle client never sends."""
        while True:
            closing = [connection.transport for connection in self.server_state.connections if connection.transport.is_closing()]
            await asyncio.sleep(TLS_CLOSE_SECONDS)
            for transport in closing:
                if not transport.get_write_buffer_size():
                    transport.abort()

    def reload_certificate(self) -> None:
        """Uses the files' present content for new connections. Raises OSError and changes nothing when it cannot be used."""
        config = self.config
        assert config.ssl is not None and config.ssl_certfile is not None
        config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none: SignalShutdown does, since the server goes on for a while after SIGTERM."""
        yield


async def _let_come() -> None:
    """Lets the loop accept and read what the system has for it: a connection takes it a few turns."""
    for _ in range(COMING_TURNS):
        await asyncio.sleep(0)
