"""Host names that this endpoint answers for: a protection against DNS rebinding."""

import ipaddress
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError


class AllowedHosts:
    """Answers 421 to a request whose Host is a name that is not listed.

    A web page can make its own host name point to this machine, and a browser then sends requests here with that name. Neither
    CORS nor a firewall sees a difference. Nobody can redirect addresses and `localhost`, so requests to them pass. Clients without
    a Host header, which are no browsers, pass too.
    """

    def __init__(self, app: ASGIApp, *, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = tuple(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _host(scope) if scope["type"] == "http" else None
        if name is None or is_allowed(name, self._allowed):
            await self._app(scope, receive, send)
        else:
            await send_error(scope, send, _misdirected(name))


def is_allowed(host: str, allowed: Sequence[str]) -> bool:
    """`host` is the value of a Host header; `allowed` are names in lower case, and *.NAME for all names below one."""
    name = _without_port(host).rstrip(".").lower()
    return _is_local(name) or any(_matches(name, pattern) for pattern in allowed)


def _matches(name: str, pattern: str) -> bool:
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_local(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host(scope: Scope) -> str | None:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)


def _misdirected(name: str) -> ApiError:
    return ApiError(421, f"this server does not answer for the host {name[:200]!r}", code="host_not_allowed")
