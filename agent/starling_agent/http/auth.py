"""The check of API keys."""

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.api_keys import ApiKeys, cache_salt_of
from starling_agent.http.errors import ApiError, send_error

OPEN_PATHS = frozenset(
    {"/health", "/ping", "/ready", "/load", "/metrics", "/version", "/docs", "/openapi.json", "/docs/oauth2-redirect"}
)


class KeyCheck:
    """Passes requests with one of the keys as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, and requests to open paths.

    With `salted`, the request's state gets the salt of its key.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, salted: bool) -> None:
        self._app = app
        self._keys = keys
        self._salted = salted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = bearer(scope) or _api_key(scope)
        if key is None:
            await send_error(send, _unauthorized("no API key was given; send it as 'Authorization: Bearer KEY'"))
        elif not self._keys.knows(key):
            await send_error(send, _unauthorized("the API key is not known here"))
        else:
            scope["state"]["key_owner"] = owner = cache_salt_of(key)
            scope["state"]["key_salt"] = owner if self._salted else None
            await self._app(scope, receive, send)


def bearer(scope: Scope) -> bytes | None:
    """Returns the token of `Authorization: Bearer TOKEN`."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() or None if scheme.lower() == b"bearer" else None
    return None


def _api_key(scope: Scope) -> bytes | None:
    """Returns the key as Anthropic's clients send it."""
    return next((value.strip() or None for name, value in scope["headers"] if name == b"x-api-key"), None)


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
