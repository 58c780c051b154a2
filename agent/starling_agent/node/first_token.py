"""Proof by use: a request of one token through a real HTTP endpoint, as a client would send it."""

import asyncio
from collections.abc import Callable

import httpx
import structlog
from pydantic_core import from_json

from starling_agent.contract.listening import EVERYWHERE, authority
from starling_agent.http.received import post
from starling_agent.node.failures import passing

TIMEOUT = httpx.Timeout(60.0, connect=2.0)
"""A Service whose endpoints are changing may drop what is sent to it. The kernel tries the same connection again, which goes where
the first try went; another connection is let through.
"""
ATTEMPTS = 3
FIRST_DELAY, MAX_DELAY = 0.25, 10.0
log = structlog.get_logger("starling.agent")


class FirstToken:
    """Asks for one token of `model`. Certificates are not verified: it asks itself, by a name that no certificate holds."""

    def __init__(self, model: str, api_key: Callable[[], str | None]) -> None:
        self._body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0.0}
        self._api_key = api_key

    async def ask(self, base_url: str) -> str | None:
        """None when a token came, else why not."""
        url = base_url.removesuffix("/").removesuffix("/v1") + "/v1/completions"
        try:
            # Proxies of the environment are for the world outside.
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=TIMEOUT, headers=self._headers()) as client:
                status, body = await post(client, url, json=self._body)
                if status != 200:
                    return f"{url} answered {status}: {body[:300].decode(errors='replace')}"
                tokens = from_json(body)["usage"]["completion_tokens"]
                return None if tokens == 1 else f"{url} answered with {tokens} tokens in place of one"
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            return f"{url}: {type(error).__name__}: {error}"

    def _headers(self) -> dict[str, str]:
        """The request brings a key that is good now, since keys change while a node serves."""
        key = self._api_key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def insist(self, base_url: str) -> None:
        """Raises NodeFailure when no token comes after some tries."""
        for attempt in range(1, ATTEMPTS + 1):
            cause = await self.ask(base_url)
            if cause is None:
                return
            log.warning("no first token", cause=cause, attempt=attempt)
            await asyncio.sleep(FIRST_DELAY)
        raise passing(f"the engine loaded, but no token came through the endpoint: {cause}")

    async def until_seen(self, base_url: str, tell: Callable[[bool], None]) -> None:
        """Tries until a token comes, however long that takes; `tell` hears each result."""
        delay = FIRST_DELAY
        while (cause := await self.ask(base_url)) is not None:
            log.info("no token through the service yet", cause=cause)
            tell(False)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)
        tell(True)


def own_url(host: str, port: int, *, tls: bool) -> str:
    """Where this process reaches its own listener."""
    # What listens everywhere takes IPv4 too; each pod has that loopback, of clusters with IPv6 alone as well.
    reachable = "127.0.0.1" if host in ("0.0.0.0", "", EVERYWHERE) else host
    return f"{'https' if tls else 'http'}://{authority(reachable, port)}"
