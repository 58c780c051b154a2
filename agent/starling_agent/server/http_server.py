"""uvicorn, with its socket bound early and its signals left to us."""

import contextlib
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI
from starling_engine.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Binds before the model is loaded: a port in use should not be told minutes later. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error}); choose another port or host", "port") from None
    return listener


class HttpServer(uvicorn.Server):
    """Ends when `should_exit` is set; then waits for open requests unless `force_exit` is set too."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # An event loop runs already, and there is neither start-up work in the app nor a websocket route.
                loop="none",
                lifespan="off",
                ws="none",
                http="h11",
                access_log=False,
                log_config=None,
                backlog=BACKLOG,
                server_header=False,
                timeout_keep_alive=65,
                h11_max_incomplete_event_size=64 * 1024,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none: `Shutdown` does, for one SIGTERM must not close the door at once."""
        yield
