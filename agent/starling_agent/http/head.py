"""HEAD works wherever GET does: load balancers and link checkers ask so."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """The answer is GET's; the server below, which still knows what was asked, leaves its body out (RFC 9110, section 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
