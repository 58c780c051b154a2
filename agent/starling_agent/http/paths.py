"""Forgives doubled and trailing slashes: base URLs are often written with one slash too many (`/v1//models`)."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("//+")


class PlainPaths:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = plain(scope["path"])
            if path != scope["path"]:
                scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def plain(path: str) -> str:
    single = _SLASHES.sub("/", path)
    return single if single == "/" else single.rstrip("/")
