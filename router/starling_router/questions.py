"""Questions that a router asks backends for itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starling_agent.client.bounded import MOST_BYTES, BadAnswer, read_all
from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_agent.http.errors import ApiError

from starling_router.backend import Backend
from starling_router.upstream import BackendUnreachable, Upstream


class BackendLate(BackendUnreachable):
    """A backend has not answered in time. It may be busy."""


class Questions:
    """Asks with the router's own key and token, where there are. Requests go on with the keys of their clients."""

    def __init__(self, upstream: Upstream, own_key: Callable[[], str | None], token: FileToken | None) -> None:
        self._upstream, self._own_key, self._token = upstream, own_key, token

    @property
    def shows_token(self) -> bool:
        """Says whether backends may believe that a router asks."""
        return self._token is not None

    async def ask(self, backend: Backend, path: str, seconds: float, most: int = MOST_BYTES) -> bytes:
        """Returns the answer's body of at most so many bytes. Raises BackendUnreachable; BackendLate where none comes in time."""
        try:
            async with asyncio.timeout(seconds), self.stream(backend, path) as chunks:
                return await read_all(chunks, most)
        except TimeoutError:
            raise BackendLate(f"no answer within {seconds:g} s") from None
        except BadAnswer as error:
            raise BackendUnreachable(str(error)) from None

    @asynccontextmanager
    async def stream(self, backend: Backend, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Gives the answer's body as it comes. Raises BackendUnreachable where there is none, or it breaks off."""
        key = self._own_key()
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        if self._token is not None:
            headers.append((ROUTER_TOKEN.encode(), self._token.value))
        try:
            async with self._upstream.send("GET", backend.url + path, headers, b"") as answer:
                if answer.status != 200:
                    raise BackendUnreachable(f"it answers {answer.status}")
                yield answer.chunks
        except ApiError as error:
            raise BackendUnreachable(str(error)) from None
