"""The check of API keys."""

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.api_keys import ApiKeys, cache_salt_of, tenant_owner
from starling_agent.contract.router import LONE, PRIORITY, PROOF_PATH, ROUTER_TOKEN, SHADOW, TENANT
from starling_agent.file_token import FileToken
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError

_TOKEN, _TENANT, _PRIORITY, _LONE, _SHADOW = (name.encode() for name in (ROUTER_TOKEN, TENANT, PRIORITY, LONE, SHADOW))
STATE_PATHS = frozenset({"/backend", "/backend/prompting", "/backend/cache", "/router/report"})
"""A caller with the routers' token needs no key to ask for the state of a server, or of a router."""
OPEN_PATHS = frozenset(
    {
        *("/health", "/ping", "/ready", "/load", "/metrics", "/version"),
        *("/docs", "/openapi.json", "/docs/oauth2-redirect", "/ui", PROOF_PATH),
    }
)
"""Probes, pages that hold no secret, and the proof to routers, who show nobody a key before it. /ui is a router's alone."""


def shows_router_token(scope: Scope, token: FileToken | None) -> bool:
    """Says whether a request shows the token that only routers, agents and the operator have. Without one, none is believed."""
    return token is not None and token.matches(dict(scope["headers"]).get(_TOKEN, b""))


def is_of_router(scope: Scope) -> bool:
    """Says whether `KeyCheck` has seen that token. It sees nothing on open paths."""
    return bool(scope.get("state", {}).get("of_router"))


class KeyCheck:
    """Passes requests with one of the keys as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, and requests to open paths.

    A router that shows the token has checked the key itself where it names a tenant, which then stands in the key's place. With
    `salted`, the request's state gets the salt of its key or tenant. Without keys all requests pass.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, salted: bool, router_token: FileToken | None = None) -> None:
        self._app = app
        self._keys = keys
        self._salted = salted
        self._router_token = router_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"]) if shows_router_token(scope, self._router_token) else None
        scope["state"]["of_router"] = headers is not None
        scope["state"]["is_shadow"] = headers is not None and _SHADOW in headers
        scope["state"]["is_lone"] = headers is not None and _LONE in headers
        if headers is not None and (_TENANT in headers or _PRIORITY in headers):
            scope["state"]["priority"] = _number(headers.get(_PRIORITY, b"0"))
        if headers is not None and (tenant := headers.get(_TENANT)):
            self._set_owner(scope, tenant_owner(tenant))
            await self._app(scope, receive, send)
            return
        if not self._keys or (headers is not None and scope["path"] in STATE_PATHS):
            await self._app(scope, receive, send)
            return
        key = given_key(scope)
        if key is None or not self._keys.knows(key):
            await send_error(scope, send, unauthorized(key))
        else:
            self._set_owner(scope, key)
            await self._app(scope, receive, send)

    def _set_owner(self, scope: Scope, key: bytes) -> None:
        scope["state"]["key_owner"] = owner = cache_salt_of(key)
        scope["state"]["key_salt"] = owner if self._salted else None


def _number(text: bytes) -> int:
    """Returns a router's number; one that is none is a router's fault, and no client's."""
    try:
        return int(text)
    except ValueError:
        return 0


def given_key(scope: Scope) -> bytes | None:
    """Returns the API key that a request brings."""
    return bearer(scope) or _api_key(scope)


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


def unauthorized(key: bytes | None) -> ApiError:
    """Returns the error of a request with a key that nobody has, or with none."""
    if key is None:
        message = "no API key was given; send it as 'Authorization: Bearer KEY'"
    else:
        message = "the API key is not known here"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
