"""uvicorn, with its socket bound early and its signals left to us."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp
from starling_engine.errors import ConfigError

from starling_agent.contract.listening import listening_socket
from starling_agent.http.header_limit import MAX_HEADER_BYTES
from starling_agent.server.connection import ClientConnection
from starling_agent.settings import READ_SECONDS, Tls

BACKLOG = 2048
FAREWELL_SECONDS = 0.5


def bind(host: str, port: int) -> socket.socket:
    """Binds before the model is loaded: a port in use should not be told minutes later. Raises ConfigError."""
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another port or host", "port") from None


class HttpServer(uvicorn.Server):
    """Ends when `should_exit` is set; then waits for open requests unless `force_exit` is set too.

    A header must come within `read_seconds`; `connection_seconds` is as `ClientConnection` has it. Raises ConfigError for a
    certificate or key that cannot be used.
    """

    def __init__(
        self, app: ASGIApp, tls: Tls | None = None, read_seconds: float = READ_SECONDS, connection_seconds: float = 0.0
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # An event loop runs already, and there is neither start-up work in the app nor a websocket route.
                loop="none",
                lifespan="off",
                ws="none",
                http=functools.partial(  # type: ignore[arg-type]  # a class would do no more
                    ClientConnection, read_seconds=read_seconds, connection_seconds=connection_seconds
                ),
                access_log=False,
                log_config=None,
                backlog=BACKLOG,
                server_header=False,
                timeout_keep_alive=65,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ssl_certfile=tls.cert_file if tls is not None else None,
                ssl_keyfile=tls.key_file if tls is not None else None,
            )
        )
        try:
            self.config.load()
        except OSError as error:  # ssl.SSLError is one
            assert tls is not None
            raise ConfigError(f"{tls.cert_file} and {tls.key_file} cannot be used: {error}", "tls_cert_file") from None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is None:
            await super().shutdown(sockets)
            return
        farewells = asyncio.create_task(self._cut_farewells())
        try:
            await super().shutdown(sockets)
        finally:
            farewells.cancel()

    async def _cut_farewells(self) -> None:
        """A TLS connection that closes waits half a minute for its peer's farewell, which an idle client never sends."""
        while True:
            closing = [connection.transport for connection in self.server_state.connections if connection.transport.is_closing()]
            await asyncio.sleep(FAREWELL_SECONDS)
            for transport in closing:
                if not transport.get_write_buffer_size():
                    transport.abort()

    def reload_certificate(self) -> None:
        """New connections get what the files hold now. Raises OSError and changes nothing when that cannot be used."""
        config = self.config
        assert config.ssl is not None and config.ssl_certfile is not None
        config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none: `Shutdown` does, for one SIGTERM must not close the door at once."""
        yield
