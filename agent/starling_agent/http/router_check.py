"""The check that a request comes through a router, while routers are all that clients are led to."""

from starlette.types import ASGIApp, Receive, Scope, Send

from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.http.auth import OPEN_PATHS
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError
from starling_agent.routers_only import RoutersOnly

_TOKEN = ROUTER_TOKEN.encode()


class RouterCheck:
    """Refuses requests without the routers' token, but for open paths: whoever scrapes /metrics has none."""

    def __init__(self, app: ASGIApp, *, rule: RoutersOnly) -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == _TOKEN), b"") if scope["type"] == "http" else b""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._rule.admits(given):
            await self._app(scope, receive, send)
            return
        why = "this pod answers the routers of its service alone; send requests to the service"
        await send_error(scope, send, ApiError(403, why, code="routers_only"))
