"""API keys."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.http.refusing import send_error
from starling_agent.openai.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json", "/docs/oauth2-redirect"})


class KeyCheck:
    """Lets a request through that brings one of the keys as `Authorization: Bearer KEY`, or asks for an open path.

    Keys are compared as digests, in constant time and always all of them, so that time tells nothing about any.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = bearer(scope)
        if key is None:
            await send_error(send, _unauthorized("no API key was given; send it as 'Authorization: Bearer KEY'"))
        elif not self._known(key):
            await send_error(send, _unauthorized("the API key is not known here"))
        else:
            scope["state"]["authenticated"] = True
            await self._app(scope, receive, send)

    def _known(self, key: bytes) -> bool:
        asked = _digest(key)
        matches = [hmac.compare_digest(asked, digest) for digest in self._digests]
        return any(matches)


def bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() or None if scheme.lower() == b"bearer" else None
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
