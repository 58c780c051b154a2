"""Proxy in place of a Service: a port whose connections go in turn to the ready agents, or to the router before them."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Sequence

Address = tuple[str, int]
_CHUNK = 64 * 1024
_LISTEN_BACKLOG = 1024
_ERROR = {
    "error": {
        "message": "no pod is ready yet; see the table of `starling up`",
        "type": "service_unavailable",
        "param": None,
        "code": "not_ready",
    }
}


def _not_ready() -> bytes:
    body = json.dumps(_ERROR).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class LocalProxy:
    """Passes bytes on. The only HTTP that it knows is a 503 while no pod is ready."""

    def __init__(self) -> None:
        self._ready: tuple[Address, ...] = ()
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Returns the port, which is a free one for 0. Raises OSError where it is taken."""
        self._server = await asyncio.start_server(self._accepted, host, port, backlog=_LISTEN_BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    def set_ready(self, addresses: Sequence[Address]) -> None:
        """Sends new connections to these addresses; open ones stay."""
        self._ready = tuple(addresses)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            # Only `close` cancels; the server's own callback would log a traceback for it.
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self._connect()
        if upstream is None:
            with contextlib.suppress(OSError):
                # The request is read first: closing on unread bytes would reset the connection, and the answer with it.
                await reader.read(_CHUNK)
                writer.write(_not_ready())
                await writer.drain()
            return
        upstream_reader, upstream_writer = upstream
        try:
            await asyncio.gather(_pump(reader, upstream_writer), _pump(upstream_reader, writer))
        finally:
            upstream_writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connects to the next address in turn that accepts."""
        ready = self._ready
        first = next(self._turn)
        for offset in range(len(ready)):
            host, port = ready[(first + offset) % len(ready)]
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(host, port)
        return None


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copies until the source ends, and then ends the target's input; the target may still answer."""
    try:
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
    except OSError:
        # One side is gone: the other must not wait for it.
        target.close()
