"""Picks the endpoint of a gateway's request, and counts it there until its answer has ended."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from starling_agent.contract.listening import authority
from starling_agent.http.auth import OPEN_PATHS
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError, as_api_error
from starling_agent.http.open_requests import ClientGone
from starling_engine.errors import ConfigError, StarlingError

from starling_router.accounts import Account, Bill
from starling_router.backend import Backend
from starling_router.canary import PlacedRequest
from starling_router.client_requests import check_request
from starling_router.epp.metrics import EppMetrics
from starling_router.epp.stream import EXTENSION, ExtProcStream, GatewayAnswer
from starling_router.exchange import Exchange
from starling_router.hold import ELSEWHERE, BackendRefusal, HeldRequest
from starling_router.picker import Pick
from starling_router.routing import ClientRequest, RequestRouting, explanation
from starling_router.service_state import ServiceState
from starling_router.upstream import BackendAnswer, RawHeaders, is_stream
from starling_router.without_servers import answer_without_servers

MOST_REFUSAL_BYTES = 1 << 16
"""Bytes of an endpoint's refusal that are read, for its code."""


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """A gateway's request on its way."""

    stream: ExtProcStream
    request: ClientRequest
    placed: PlacedRequest
    bill: Bill
    began: float


class PickApp:
    """An ASGI application whose requests are those of ExtProcStream, which is an extension of their scope."""

    def __init__(self, routing: RequestRouting, epp_metrics: EppMetrics, state: ServiceState, fallbacks: int) -> None:
        self._routing, self._backends, self._metrics = routing, routing.backends, routing.metrics
        self._epp_metrics, self._state, self._fallbacks = epp_metrics, state, fallbacks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream: ExtProcStream = scope["extensions"][EXTENSION]
        began = time.perf_counter()
        try:
            check_request(scope)
            account = self._routing.accounts.of(scope)
            body = await Request(scope, receive).body()
            if (answer := answer_without_servers(scope, self._backends, self._state.models)) is not None:
                await answer(scope, receive, send)
                return
            await self._route(stream, scope, body, account, began, send)
        except (ClientDisconnect, ClientGone):
            return
        except (ApiError, StarlingError) as error:
            await send_error(scope, send, as_api_error(error))

    async def _route(self, stream: ExtProcStream, scope: Scope, body: bytes, account: Account, began: float, send: Send) -> None:
        came = time.perf_counter()
        request = await self._routing.read(scope, body, account, "/{picked}")
        self._metrics.added.observe(time.perf_counter() - came)
        # Only what may go to any endpoint waits, or has a place: others of a subset are no use to it.
        is_free = stream.subset is None
        placed = self._routing.place(request, is_free=is_free)
        with self._routing.admitted(request, placed, Exchange(scope, send), waits=is_free, streams=False) as (bill, held):
            picked = GatewayRequest(stream, request, placed, bill, began)
            pick = await self._pick(picked, held)
            await held.attempt(pick.backend, self._carry(picked, pick, held, send))

    async def _pick(self, request: GatewayRequest, held: HeldRequest) -> Pick:
        """Returns the pick, now or when an endpoint may have room. Raises ApiError where there is none."""
        pick = None if held.is_behind else self._try_pick(request, held)
        while pick is None:
            if not await held.wait():
                self._metrics.refused.inc()
                raise _no_endpoint(request.stream.subset)
            pick = self._try_pick(request, held)
        return pick

    def _try_pick(self, request: GatewayRequest, held: HeldRequest) -> Pick | None:
        return self._routing.pick(request.request, request.placed, self._ready(request, held))

    def _ready(self, request: GatewayRequest, held: HeldRequest) -> list[Backend]:
        subset = request.stream.subset
        return [backend for backend in held.choices(self._backends.ready) if subset is None or endpoint_of(backend.url) in subset]

    async def _carry(self, request: GatewayRequest, pick: Pick, held: HeldRequest, send: Send) -> BackendRefusal | None:
        """Has the gateway send the request, and counts it until its answer has ended. Returns a refusal of the endpoint."""
        stream, prompt, routing = request.stream, request.request.prompt, self._routing
        ready, order = self._ready(request, held), request.placed.order
        others = routing.picker.fallbacks(pick, ready, prompt.tokens, self._fallbacks, order)
        with ExitStack() as counts:
            computed = max(0, prompt.tokens - pick.cached)
            request.bill.sent(computed)
            carried = counts.enter_context(pick.backend.carrying(computed, leads=request.request.leads))
            endpoints = [endpoint_of(backend.url) for backend in (pick.backend, *others)]
            request.placed.sent()
            await stream.route(endpoints, request.request.body, self._headers(request.request))

            def server_of(answer: GatewayAnswer) -> Backend:
                return next((backend for backend in others if endpoint_of(backend.url) == answer.served), pick.backend)

            def more(answer: GatewayAnswer) -> RawHeaders:
                # Of a server that the gateway took in place of the pick there is nothing to explain.
                why = explanation(request.request.scope, pick) if server_of(answer) is pick.backend else []
                return [*why, *request.request.account.headers()]

            answer = await stream.answer(more)
            if answer.status >= 400:
                request.bill.refused()
            carried.began()
            served = server_of(answer)
            if served is not pick.backend:
                counts.close()
                counts.enter_context(served.carrying(0))
            await send({"type": "http.response.start", "status": answer.status, "headers": []})  # for the log and its counts
            if answer.status not in ELSEWHERE:
                request.placed.begin(served, answer.status, streams=is_stream(answer.headers))
                routing.prefixes.sent(served.number, prompt)
                self._metrics.picked(pick.backend, pick.reason, tokens=prompt.tokens, cached=pick.cached, exact=prompt.exact)
            refusal = await self._pass(request, served, answer)
            return refusal if answer.status in ELSEWHERE and served is pick.backend else None

    def _headers(self, request: ClientRequest) -> dict[bytes, bytes]:
        """Returns what endpoints are told of a request: of one that needed no key, nothing that they would believe."""
        return (
            {} if request.scope["path"] in OPEN_PATHS else request.account.backend_headers(self._routing.token, leads=request.leads)
        )

    async def _pass(self, request: GatewayRequest, served: Backend, answer: GatewayAnswer) -> BackendRefusal:
        """Waits for the answer's end. Returns its beginning, which says why if it is a refusal; that is counted here.

        What ends with a piece is done before it is let pass: once the gateway has the last one, it may end the call.
        """
        kept, is_first, refuses = b"", True, answer.status in ELSEWHERE
        pieces = request.stream.pieces()

        def note(beginning: bytes) -> BackendRefusal:
            refusal = BackendRefusal(served, BackendAnswer(answer.status, answer.headers, pieces), beginning)
            if refuses:
                request.placed.begin(served, answer.status, streams=False, ends=refusal.ends)
            return refusal

        request.bill.begin(answer.headers)
        if request.stream.answer_ended:
            request.bill.complete()
        async for piece in pieces:
            request.placed.piece(piece)
            if is_first:
                is_first = False
                self._epp_metrics.first_piece(time.perf_counter() - request.began)
            request.bill.take(piece)
            if refuses:
                kept = (kept + piece)[:MOST_REFUSAL_BYTES]
            if request.stream.answer_ended:
                request.bill.complete()
                note(kept)
        return note(kept)


@lru_cache(maxsize=4096)
def endpoint_of(url: str) -> str:
    """Returns a backend's address and port, as a gateway knows it. Raises ConfigError where its URL has a name or a path."""
    parts = urlsplit(url)
    try:
        address = ip_address(parts.hostname or "")
    except ValueError:
        raise ConfigError(
            f"{url} has to be http://ADDRESS:PORT for a gateway, which knows endpoints by address", "backends"
        ) from None
    if parts.path:
        raise ConfigError(f"{url} has a path, and a gateway sends to an address and a port alone", "backends")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return authority(str(address), port)


def _no_endpoint(subset: frozenset[str] | None) -> ApiError:
    which = "endpoint of this pool" if subset is None else "endpoint that the gateway allows for this request"
    why = f"no {which} accepts requests now; try again soon"
    return ApiError(503, why, kind="server_error", code="no_backend", headers={"Retry-After": "5"})
