"""Answers /ui with the page, which holds no secret, and /ui/state with what a key may see."""

import base64
import hashlib
import re
from pathlib import Path

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError

from starling_router.accounts import Accounts
from starling_router.ui.state import UiView

PAGE = "/ui"


class UiApp:
    """An ASGI application of PAGE and its state. Keys are checked before it, and tenants' keys by `accounts`."""

    def __init__(self, view: UiView, accounts: Accounts) -> None:
        self._view, self._accounts = view, accounts
        self._page = Path(__file__).with_name("page.html").read_bytes()
        self._headers = page_headers(self._page.decode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] != "GET":  # HEAD comes as GET
                why = f"{scope['method']} is not possible on {scope['path']}"
                raise ApiError(405, why, code="method_not_allowed", headers={"Allow": "GET, HEAD"})
            if scope["path"] == PAGE:
                answer = Response(self._page, headers=self._headers)
            else:
                state = msgspec.json.encode(self._view.state(self._accounts.of(scope)))
                answer = Response(state, media_type="application/json", headers={"cache-control": "no-store"})
            await answer(scope, receive, send)
        except ApiError as error:
            await send_error(scope, send, error)


def page_headers(page: str) -> dict[str, str]:
    """Returns the headers of a page whose one style and one script are all that it may run; text never becomes markup in it."""
    policy = {
        "default-src": "'none'",
        "script-src": _hash(page, "script"),
        "style-src": _hash(page, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _hash(page: str, element: str) -> str:
    """Returns the source expression for the content of the page's one such element."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
