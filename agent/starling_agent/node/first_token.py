"""Test that a model serves: a request through its HTTP endpoint, as a client would send it, for one token or what else it gives."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Literal

import httpx
import structlog
from pydantic_core import from_json
from starling_engine.model_config.config import ModelConfig

from starling_agent.client.bounded import UNCOMPRESSED, read_all
from starling_agent.contract.listening import EVERYWHERE, authority
from starling_agent.contract.router import POD, ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_agent.node.failures import transient

TIMEOUT = httpx.Timeout(60.0, connect=2.0)
"""A Service whose endpoints change may drop packets. The kernel retries a connection to the same endpoint, so it helps only to give
up soon and open another one.
"""
ATTEMPTS = 3
FIRST_DELAY, MAX_DELAY = 0.25, 10.0
log = structlog.get_logger("starling.agent")


Wanted = Literal["token", "vector", "labels"]
_ASKED: Mapping[Wanted, tuple[str, Mapping[str, Any]]] = {
    "token": ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0.0}),
    "vector": ("/pooling", {"input": "Hello"}),
    "labels": ("/classify", {"input": "Hello"}),
}
"""Paths and fields of requests."""


def wanted_of(model: ModelConfig) -> Wanted:
    """Returns what a model gives whatever its files lack: vectors of one with a head for labels may not be possible."""
    if model.has_lm_head:
        return "token"
    return "vector" if model.classifier is None else "labels"


class FirstToken:
    """Requests one token of `model`; of one that gives none a vector, or labels.

    Answers are bounded, since another server may listen at the address.

    Certificates are not verified: the process calls itself, by a name that no certificate has. Routers that share `router_token`
    send the request to the pod that it names, this one.
    """

    def __init__(self, model: str, api_key: Callable[[], str | None], pod: str, router_token: FileToken) -> None:
        self._pod, self._router_token = pod, router_token
        self._model = model
        self._api_key = api_key
        self.wanted: Wanted = "token"
        """Set when the model is known."""

    async def request(self, base_url: str) -> str | None:
        """Returns None when it came, else the cause."""
        path, asked = _ASKED[self.wanted]
        url = base_url.removesuffix("/").removesuffix("/v1") + path
        try:
            # Proxies of the environment are not for this process itself.
            async with httpx.AsyncClient(verify=False, trust_env=False, timeout=TIMEOUT, headers=self._headers()) as client:
                async with client.stream("POST", url, json={"model": self._model, **asked}) as answer:
                    found = await read_all(answer.aiter_raw())
                if answer.status_code != httpx.codes.OK:
                    return f"{url} answered {answer.status_code}: {found[:300].decode(errors='replace')}"
                return self._fault(url, from_json(found))
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            return f"{url}: {type(error).__name__}: {error}"

    def _fault(self, url: str, answer: Any) -> str | None:
        if self.wanted != "token":
            first = answer["data"][0]
            return None if first["data" if self.wanted == "vector" else "probs"] else f"{url} answered without {self.wanted}"
        tokens = answer["usage"]["completion_tokens"]
        return None if tokens == 1 else f"{url} answered with {tokens} tokens in place of one"

    def _headers(self) -> dict[str, str]:
        """Authorizes with a key that is valid now: keys change while a node serves."""
        key = self._api_key()
        headers = {**UNCOMPRESSED, POD: self._pod, ROUTER_TOKEN: self._router_token.value.decode()}
        return headers | ({"Authorization": f"Bearer {key}"} if key else {})

    async def require(self, base_url: str) -> None:
        """Raises NodeFailure when no token comes after ATTEMPTS tries."""
        for attempt in range(1, ATTEMPTS + 1):
            cause = await self.request(base_url)
            if cause is None:
                return
            log.warning("no first token", cause=cause, attempt=attempt)
            await asyncio.sleep(FIRST_DELAY)
        raise transient(f"the engine loaded, but no token came through the endpoint: {cause}")

    async def until_seen(self, base_url: str, on_result: Callable[[bool], None]) -> None:
        """Tries until a token comes, without a limit of time; `on_result` is called after each try."""
        delay = FIRST_DELAY
        while (cause := await self.request(base_url)) is not None:
            log.info("no token through the service yet", cause=cause)
            on_result(False)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)
        on_result(True)


def local_url(host: str, port: int, *, tls: bool) -> str:
    """Returns the URL at which this process reaches its own listener."""
    # A listener on all addresses takes IPv4 too. Every pod has that loopback, also where the cluster has IPv6 alone.
    reachable = "127.0.0.1" if host in ("0.0.0.0", "", EVERYWHERE) else host
    return f"{'https' if tls else 'http'}://{authority(reachable, port)}"
