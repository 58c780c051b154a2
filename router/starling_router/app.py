"""The router's application: picks a backend for each request, gives its answer, and takes another where one is gone."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starling_agent.client.bounded import BadAnswer, read_all
from starling_agent.contract.router import POD
from starling_agent.drain import Drain
from starling_agent.http.auth import OPEN_PATHS, shows_router_token
from starling_agent.http.error_forms import send_error
from starling_agent.http.errors import ApiError, as_api_error
from starling_agent.http.open_requests import ClientGone, OpenRequests
from starling_agent.openai.stream_record import COUNTED, RESUMABLE, RESUME_TYPE
from starling_agent.version import starling_version
from starling_engine.errors import StarlingError

from starling_router.accounts import Bill
from starling_router.backend import Backend
from starling_router.canary import PlacedRequest
from starling_router.client_requests import check_request
from starling_router.exchange import Exchange
from starling_router.hold import ELSEWHERE, BackendRefusal, HeldRequest
from starling_router.metrics import CONTENT_TYPE
from starling_router.noted_stream import NotedStream
from starling_router.operator_polls import PATH, OperatorPolls
from starling_router.picker import Pick
from starling_router.routing import ClientRequest, RequestRouting, explanation
from starling_router.service_state import ServiceState
from starling_router.stored import pod_name
from starling_router.ui.app import UiApp
from starling_router.upstream import BackendAnswer, BackendUnreachable, RawHeaders, Upstream, forwarded_headers, is_stream
from starling_router.without_servers import answer_without_servers

RESUME = b"x-starling-resume"
NEVER = b"never"
"""Value of RESUME for a stream that may end where its backend does."""
_POD, _RESUMABLE = POD.encode(), RESUMABLE.encode()
MOST_LOST = 3
"""Servers that may go away under a request: it may be what ends them."""

OWN_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", "/ui", "/ui/state"})
"""Known to the log by their names, as it leaves out those that machines ask for every few seconds."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A request on its way, the revisions that may serve it, and its answer if that has notes."""

    request: ClientRequest
    placed: PlacedRequest
    notes: NotedStream | None


class RouterApp:
    """Answers for itself on the paths of probes and of the page, and for the backends on all others."""

    def __init__(
        self,
        routing: RequestRouting,
        upstream: Upstream,
        drain: Drain,
        open_requests: OpenRequests,
        ui: UiApp,
        state: ServiceState,
        polls: OperatorPolls,
    ) -> None:
        """Streams are resumed where the routing has a token."""
        self._routing, self._upstream = routing, upstream
        self._backends, self._metrics, self._token = routing.backends, routing.metrics, routing.token
        self._drain, self._open_requests = drain, open_requests
        self._ui, self._state, self._polls = ui, state, polls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in OWN_PATHS:
            scope["route"] = SimpleNamespace(path=path)
        match path:
            case "/health" | "/ping":
                await _json(b'{"status":"ok"}')(scope, receive, send)
            case "/ready":
                await self._answer_ready(scope, receive, send)
            case "/metrics":
                await Response(self._metrics.render(), media_type=CONTENT_TYPE)(scope, receive, send)
            case "/version":
                await _json(msgspec.json.encode({"version": starling_version()}))(scope, receive, send)
            case "/ui" | "/ui/state":
                await self._ui(scope, receive, send)
            case str() if path == PATH:
                await self._answer_operator(scope, receive, send)
            case _:
                await self._answer_routed(scope, receive, send)

    async def _answer_ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._drain.draining:
            await send_error(scope, send, ApiError(503, "the router is shutting down", kind="server_error", code="shutting_down"))
        elif not self._backends.ready:
            await send_error(scope, send, self._no_backend(scope))
        else:
            await _json(b'{"status":"ready"}')(scope, receive, send)

    async def _answer_operator(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = SimpleNamespace(path=PATH)
        try:
            await self._polls.answer(scope, receive, send)
        except ClientDisconnect:
            return
        except ApiError as error:
            await send_error(scope, send, error)

    async def _answer_routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send)
        try:
            check_request(scope)
            pod = self._named_pod(scope)
            accounts = self._routing.accounts
            account = accounts.of(scope) if pod is None else accounts.everybody
            body, began = await _read(receive), time.perf_counter()
            if (answer := answer_without_servers(scope, self._backends, self._state.models)) is not None:
                await answer(scope, receive, send)
                return
            request = await self._routing.read(scope, body, account, "/{routed}", pod)
            routed = Routed(request, self._routing.place(request), self._notes(request))
            with self._routing.admitted(request, routed.placed, exchange, waits=True, streams=request.streams) as (bill, held):
                await self._open_requests.run(receive, self._route(routed, exchange, held, bill, began))
        except ClientGone:
            return
        except (ApiError, StarlingError) as error:
            await exchange.fail(as_api_error(error))

    def _notes(self, request: ClientRequest) -> NotedStream | None:
        """Returns what a stream's notes go to, if it may have some. They count its tokens also where it may not be resumed."""
        resumes = dict(request.scope["headers"]).get(RESUME, b"").strip().lower() != NEVER
        return NotedStream(resumes=resumes) if request.body and request.pod is None and self._token is not None else None

    def _named_pod(self, scope: Scope) -> str | None:
        """Returns the pod that an agent's request names. Nobody else may."""
        pod: bytes | None = dict(scope["headers"]).get(_POD)
        return pod.decode("latin-1") if pod is not None and shows_router_token(scope, self._token) else None

    async def _route(self, routed: Routed, exchange: Exchange, held: HeldRequest, bill: Bill, began: float) -> None:
        """Has a request answered. Raises ApiError, before its answer has begun or for one that is cut, which it counts."""
        self._metrics.added.observe(time.perf_counter() - began)
        try:
            await self._send_on(routed, exchange, held, bill)
        except ApiError:
            if exchange.begun:
                self._metrics.broken.inc()
                routed.placed.broken()
            raise

    async def _send_on(self, routed: Routed, exchange: Exchange, held: HeldRequest, bill: Bill) -> None:
        """Sends a request to one backend after the other until one answers. The last one's refusal is the answer.

        Raises ApiError where the answer has begun, and nobody goes on with it.
        """
        tried, lost, losses = list[str](), "", 0
        refusal: BackendRefusal | None = None
        while losses < MOST_LOST and (pick := await self._next(routed, tried, exchange, held)) is not None:
            if tried and not exchange.begun:
                self._metrics.retries.inc()
            tried.append(pick.backend.name)
            try:
                refusal = await held.attempt(pick.backend, self._try(routed, pick, exchange, bill))
            except BackendUnreachable as error:
                pick.backend.ready = False
                if error.had_it:
                    routed.placed.lost(pick.backend)
                losses += error.had_it
                lost = f"{pick.backend.name} went away ({error})"
                continue
            if refusal is None:
                return
        if exchange.begun:
            raise _lost(lost)
        if losses == MOST_LOST:
            raise ApiError(502, f"{losses} servers went away under this request", kind="server_error", code="backend_lost")
        if refusal is None:
            self._metrics.refused.inc()
            raise self._no_backend(routed.request.scope)
        routed.placed.begin(refusal.backend, refusal.answer.status, streams=False, ends=refusal.ends)
        await exchange.begin(refusal.answer, [])
        await exchange.end(refusal.body)

    async def _next(self, routed: Routed, tried: list[str], exchange: Exchange, held: HeldRequest) -> Pick | None:
        """Returns the next backend to try, now or when one may have room; None: those that were tried have said the last word.

        A stream that has begun goes on at once or not at all.
        """
        pick = partial(self._routing.pick, routed.request, routed.placed)
        if exchange.begun:
            return pick(filter(routed.placed.may_resume, self._backends.ready), tried)
        found = None if held.is_behind else pick(held.choices(self._backends.ready), tried)
        while found is None and await held.wait():
            tried.clear()
            found = pick(held.choices(self._backends.ready), tried)
        return found

    async def _try(self, routed: Routed, pick: Pick, exchange: Exchange, bill: Bill) -> BackendRefusal | None:
        """Gives a backend's answer, or the rest of one. Returns it instead where another backend may have a better one.

        Raises BackendUnreachable before the answer has begun, or where it can be resumed; ApiError where it cannot.
        """
        scope, prompt = routed.request.scope, routed.request.prompt
        computed = max(0, prompt.tokens - pick.cached)
        bill.sent(computed)
        with pick.backend.carrying(computed, leads=routed.request.leads) as carried:
            headers, body = self._request(routed, exchange.begun)
            routed.placed.sent()
            async with self._upstream.send(scope["method"], _url(pick.backend, scope), headers, body) as answer:
                if answer.status >= 400:
                    bill.refused()
                if exchange.begun and not _is_noted(answer):
                    return BackendRefusal(pick.backend, answer, b"")
                if answer.status in ELSEWHERE or (answer.status == 404 and self._may_be_elsewhere(routed.request)):
                    return BackendRefusal(pick.backend, answer, await _refusal(answer))
                self._routing.prefixes.sent(pick.backend.number, prompt)
                self._metrics.picked(pick.backend, pick.reason, tokens=prompt.tokens, cached=pick.cached, exact=prompt.exact)
                if exchange.begun:
                    self._metrics.resumed.inc()
                carried.began()
                self._routing.hold.next_turn()
                await exchange.begin(answer, [*explanation(scope, pick), *routed.request.account.headers()])
                bill.begin(answer.headers)
                routed.placed.begin(pick.backend, answer.status, streams=is_stream(answer.headers))
                exchange.on_events = _taking(bill, routed.placed)
                if routed.notes is not None and _is_noted(answer):
                    routed.notes.resumes &= (_RESUMABLE, COUNTED.encode()) not in answer.headers
                    await _give_noted(answer, routed.notes, carried.backend, exchange, bill)
                else:
                    await _give(answer, carried.backend, exchange)
                bill.complete()
                return None

    def _request(self, routed: Routed, resumes: bool) -> tuple[RawHeaders, bytes]:
        """Returns headers and body for a backend, which is to go on with a stream if it `resumes`."""
        request = routed.request
        more, body = request.account.backend_headers(self._token, leads=request.leads), request.body
        more[b"x-request-id"] = request.scope["state"]["request_id"].encode()
        if routed.notes is not None:
            more[_RESUMABLE] = b"yes"
            if resumes:
                more[b"content-type"], body = RESUME_TYPE.encode(), routed.notes.record(body)
        return forwarded_headers(request.scope, more), body

    def _may_be_elsewhere(self, request: ClientRequest) -> bool:
        """Says whether another backend may have the response that a request is about: its id names none that is here."""
        if request.response is None:
            return False
        pod = pod_name(request.response)
        return pod is None or all(backend.pod != pod for backend in self._backends.ready)

    def _no_backend(self, scope: Scope) -> ApiError:
        has_shown_key = scope["path"] not in OPEN_PATHS  # where there are keys
        return self._state.no_backend("no group of this service accepts requests now", with_message=has_shown_key)


def _taking(bill: Bill, placed: PlacedRequest) -> Callable[[bytes], None]:
    """Returns what is to be called with each piece of an answer."""

    def take(piece: bytes) -> None:
        placed.piece(piece)
        bill.take(piece)

    return take


async def _give(answer: BackendAnswer, backend: Backend, exchange: Exchange) -> None:
    """Gives an answer that nobody else can go on with. Raises ApiError where it is cut."""
    try:
        async for chunk in answer.chunks:
            await exchange.write_events(chunk)
    except BackendUnreachable as error:
        backend.ready = False
        raise _lost(f"{backend.name} went away ({error})") from None
    await exchange.end()


async def _give_noted(answer: BackendAnswer, stream: NotedStream, backend: Backend, exchange: Exchange, bill: Bill) -> None:
    """Gives the events of a stream with notes. Raises BackendUnreachable where it has to be resumed, ApiError where it may not."""
    lost = BackendUnreachable("it ended the stream before its end")
    try:
        async for chunk in answer.chunks:
            events = stream.take(chunk)
            bill.gained(stream.tokens)
            if events:
                await exchange.write(events)
    except BackendUnreachable as error:
        lost = error
    if stream.is_complete:
        await exchange.end()
    elif stream.resumes:
        raise lost
    else:
        backend.ready = False
        raise _lost(f"{backend.name} went away ({lost})")


async def _refusal(answer: BackendAnswer) -> bytes:
    """Returns the body of a refusal. Raises BackendUnreachable for one that is no refusal of ours: it does not end."""
    try:
        return await read_all(answer.chunks)
    except BadAnswer as error:
        raise BackendUnreachable(str(error)) from None


def _is_noted(answer: BackendAnswer) -> bool:
    return any(name == _RESUMABLE for name, _ in answer.headers)


def _url(backend: Backend, scope: Scope) -> str:
    query = scope.get("query_string", b"")
    path = scope.get("raw_path") or scope["path"].encode()
    return f"{backend.url}{path.decode('latin-1')}{'?' if query else ''}{query.decode('latin-1')}"


def _lost(why: str) -> ApiError:
    return ApiError(502, f"the answer ended early: {why}", kind="server_error", code="backend_lost")


async def _read(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
