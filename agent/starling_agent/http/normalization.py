"""Requests in unusual forms: HEAD in place of GET, and paths with too many slashes."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("//+")


class HeadAsGet:
    """Answers HEAD wherever GET is answered: load balancers and link checkers send it.

    The server below still knows the method, and leaves the body out (RFC 9110, section 9.3.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class SlashNormalizer:
    """Removes doubled and trailing slashes: base URLs often have one slash too many (`/v1//models`)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = normalized(scope["path"])
            if path != scope["path"]:
                raw = scope.get("raw_path")  # what is encoded in it stays so: a router sends it on
                raw = path.encode() if raw is None else normalized(raw.decode("latin-1")).encode("latin-1")
                scope = {**scope, "path": path, "raw_path": raw}
        await self._app(scope, receive, send)


def normalized(path: str) -> str:
    single = _SLASHES.sub("/", path)
    return single if single == "/" else single.rstrip("/")
