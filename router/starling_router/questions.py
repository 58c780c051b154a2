"""Questions that a router asks backends for itself."""

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starling_agent.client.bounded import MOST_BYTES, BadAnswer, parse, read_all
from starling_agent.contract.backend import BackendProof
from starling_agent.contract.router import PROOF_PATH, ROUTER_TOKEN, token_proof
from starling_agent.file_token import FileToken
from starling_agent.http.errors import ApiError

from starling_router.backend import Backend
from starling_router.upstream import BackendAnswer, BackendUnreachable, RawHeaders, Upstream


class BackendLate(BackendUnreachable):
    """A backend has not answered in time. It may be busy."""


class NotOurs(BackendUnreachable):
    """A backend is of another service: an address was given to another pod, or a token is another one."""


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
            raise _late(seconds) from None
        except BadAnswer as error:
            raise BackendUnreachable(str(error)) from None

    async def check_ours(self, backend: Backend, seconds: float) -> None:
        """Has a backend prove that it knows the token, before it is shown that or a key. Raises NotOurs, and as `ask` does.

        Servers that say that they have no token are believed: agents of a service all have one. Who refuses is not.
        """
        token = b"" if self._token is None else self._token.value
        if not token:
            return
        nonce = secrets.token_hex(16)
        try:
            async with asyncio.timeout(seconds), self._answer(backend, f"{PROOF_PATH}?nonce={nonce}", []) as answer:
                given = parse(BackendProof, await read_all(_of(answer)), "proof")
        except TimeoutError:
            raise _late(seconds) from None
        except BadAnswer as error:
            raise BackendUnreachable(str(error)) from None
        if given.proof and not hmac.compare_digest(given.proof.encode(), token_proof(token, nonce.encode()).encode()):
            raise NotOurs("it is of another service, or has another token: it does not know the routers' token")

    @asynccontextmanager
    async def stream(self, backend: Backend, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Gives the answer's body as it comes. Raises BackendUnreachable where there is none, or it breaks off."""
        key = self._own_key()
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        if self._token is not None:
            headers.append((ROUTER_TOKEN.encode(), self._token.value))
        async with self._answer(backend, path, headers) as answer:
            yield _of(answer)

    @asynccontextmanager
    async def _answer(self, backend: Backend, path: str, headers: RawHeaders) -> AsyncIterator[BackendAnswer]:
        """Raises BackendUnreachable, also while the answer is read."""
        try:
            async with self._upstream.send("GET", backend.url + path, headers, b"") as answer:
                yield answer
        except ApiError as error:
            raise BackendUnreachable(str(error)) from None


def _of(answer: BackendAnswer) -> AsyncIterator[bytes]:
    """Returns the body of an answer. Raises BackendUnreachable for one that is none."""
    if answer.status != 200:
        raise BackendUnreachable(f"it answers {answer.status}")
    return answer.chunks


def _late(seconds: float) -> BackendLate:
    return BackendLate(f"no answer within {seconds:g} s")
