"""Finds servers for requests: what the application for clients and the one for gateways do alike."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

from starlette.types import Scope
from starling_agent.file_token import FileToken

from starling_router.accounts import Account, Accounts, Bill
from starling_router.backend import Backend, Backends
from starling_router.canary import CanaryTraffic, PlacedRequest
from starling_router.client_requests import costs_tokens, is_work, session_of
from starling_router.exchange import Exchange
from starling_router.gateway_headers import with_named_model
from starling_router.hold import HeldKind, HeldRequest, Hold
from starling_router.metrics import RouterMetrics
from starling_router.picker import Pick, Picker
from starling_router.prefixes import Prefixes
from starling_router.prompt import NO_PROMPT, RoutedPrompt, read_body
from starling_router.prompt_source import PromptSource
from starling_router.shadows import Shadows
from starling_router.stored import pod_name, response_of
from starling_router.upstream import RawHeaders

EXPLAIN = b"x-starling-explain"
MOST_LEADING_TOKENS = 4096
"""Prompt tokens of a request that goes before those of other tenants: longer ones would hold them up for long."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request as it came, and what is known of it.

    prompt    as it is looked for in caches
    session   that it says it is of
    response  id of the stored response that it is about
    streams   it asks for a stream
    pod       the only one that it is for: an agent proves by it that it can be reached. None: any
    """

    scope: Scope
    account: Account
    body: bytes
    prompt: RoutedPrompt
    session: str | None
    response: str | None
    streams: bool
    pod: str | None

    @property
    def leads(self) -> bool:
        """True for a tenant's only request that costs tokens, if its prompt is no longer than such ones may be."""
        return self.costs and self.account.is_lone and self.prompt.tokens <= MOST_LEADING_TOKENS

    @property
    def works(self) -> bool:
        """True for a model's work, which may wait, and for which a service at zero is woken."""
        return self.pod is None and is_work(self.scope) and bool(self.body)

    @property
    def costs(self) -> bool:
        """True for what a quota limits."""
        return self.works and costs_tokens(self.scope)


@dataclass(frozen=True, slots=True)
class RequestRouting:
    """The parts of a router that both applications use. Backends believe `token`; without one they are told no tenant."""

    backends: Backends
    picker: Picker
    prompts: PromptSource
    prefixes: Prefixes
    hold: Hold
    metrics: RouterMetrics
    accounts: Accounts
    canary: CanaryTraffic
    shadows: Shadows
    token: FileToken | None

    async def read(self, scope: Scope, body: bytes, account: Account, route: str, pod: str | None = None) -> ClientRequest:
        """Reads a request; `route` is what metrics call it.

        Raises QuotaExceeded where no prompt would come in now, ApiError for a body that cannot be for the model of a header.
        """
        body = with_named_model(scope, body)
        fields, costs = read_body(body), bool(body) and costs_tokens(scope)
        account.own(scope, self.token)
        if costs:
            account.check()
        if body:
            # A path that nobody serves must be no time series of its own.
            scope["route"] = SimpleNamespace(path=route)
        return ClientRequest(
            scope=scope,
            account=account,
            body=body,
            prompt=await self.prompts.read(scope, body, fields) if costs else NO_PROMPT,
            session=session_of(dict(scope["headers"])),
            response=response_of(scope["path"], bytes(fields.previous_response_id)),
            streams=bytes(fields.stream) == b"true",
            pod=pod,
        )

    def place(self, request: ClientRequest, *, is_free: bool = True) -> PlacedRequest:
        """Chooses the revision. A request about a stored response is not free: it goes where that is."""
        if request.pod is not None:
            return PlacedRequest()
        if not request.works:
            return self.canary.place_question()
        client, is_free = request.account.client_of(request.scope), is_free and request.response is None
        return self.canary.place(client, request.session, is_free=is_free)

    @contextmanager
    def admitted(
        self, request: ClientRequest, placed: PlacedRequest, exchange: Exchange, *, waits: bool, streams: bool
    ) -> Iterator[tuple[Bill, HeldRequest]]:
        """Counts a request to its end, and may have it asked again for a comparison. Raises QuotaExceeded.

        `waits`: it may wait if it is for work. `streams`: its answer may begin meanwhile.
        """
        share = request.account.share_of(request.scope)
        kind = HeldKind(
            works=request.works,
            size=len(request.body) if request.works and waits else 0,
            streams=streams,
            pod=None if request.response is None else pod_name(request.response),
            tokens=request.prompt.tokens,
            account=request.account,
            share=share,
            placed=placed,
            leads=lambda: request.leads,
        )
        tokens = request.prompt.tokens if request.costs else None
        with request.account.request(request.scope, tokens, share) as bill, self.hold.request(exchange, kind) as held:
            yield bill, held
        self.shadows.offer(request.scope, request.body, request.account, placed)

    def pick(
        self, request: ClientRequest, placed: PlacedRequest, choices: Iterable[Backend], tried: Sequence[str] = ()
    ) -> Pick | None:
        ready = [backend for backend in choices if request.pod in (None, backend.pod)]
        cached, begun = self.prefixes.cached_tokens(request.prompt), self.prefixes.begun_tokens(request.prompt)
        return self.picker.pick(ready, request.prompt.tokens, cached, request.session, tried, placed.order, begun)


def explanation(scope: Scope, pick: Pick) -> RawHeaders:
    """Returns the header that tells a client who asks for it which backend was picked, and why."""
    if all(name != EXPLAIN for name, _ in scope["headers"]):
        return []
    return [(b"x-starling-route", f"backend={pick.backend.name}; cached={pick.cached}; reason={pick.reason}".encode("latin-1"))]
