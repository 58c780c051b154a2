"""The endpoint picker behind a real Envoy, which sends requests where it says."""

import asyncio
import base64
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from google.protobuf.struct_pb2 import ListValue, Value
from starlette.responses import PlainTextResponse
from starling_agent.api_keys import ApiKeys
from starling_agent.drain import Drain
from starling_agent.file_token import FileToken
from starling_agent.http.middleware_stack import with_middleware
from starling_agent.routers_only import RoutersOnly
from starling_agent.settings import ServerSettings
from starling_router.epp import EppSettings
from starling_router.epp.server import EppServer
from starling_router.hold_queue import NEVER_HOLD, HoldPolicy
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter
from starling_router.shadows import SOME_SHADOWS, ShadowPolicy
from starling_router.tenants import NO_TENANTS, Tenancy

from tests.router.backends import Stepwise, StubBackend, echo, refuse, stream
from tests.router.envoy import BINARY, SUBSET_HEADER, Envoy, envoy
from tests.router.serving import metric, serving
from tests.waiting import until

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="`make envoy` installs it, where there is one for the machine")
CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
HOLD = HoldPolicy(requests=1, seconds=60)


@dataclass
class Gateway:
    """An Envoy that asks `server`, with its client, and a client of the router that this is a part of."""

    envoy: Envoy
    client: httpx.AsyncClient
    direct: httpx.AsyncClient
    server: EppServer
    ports: EppSettings

    async def open(self) -> float:
        return await metric(self.direct, "router_open_requests")

    async def all_ended(self) -> None:
        async def none_is_open() -> bool:
            return await self.open() == 0

        await until(none_is_open, "no request to be open", 20)


Behind = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def behind(backends: list[StubBackend], tmp_path: Path) -> AsyncIterator[Behind]:
    """behind(ready=2, fail_open=False, hold=NEVER_HOLD, tenancy=NO_TENANTS, **settings): an Envoy before the backends."""
    async with AsyncExitStack() as running:

        async def make(
            ready: int = 2,
            fail_open: bool = False,
            hold: HoldPolicy = NEVER_HOLD,
            tenancy: Tenancy = NO_TENANTS,
            shadows: ShadowPolicy = SOME_SHADOWS,
            secure: bool = True,
            fallbacks: int = 2,
            **settings: Any,
        ) -> Gateway:
            of_server = ServerSettings(access_log=False, **settings)
            router = ServiceRouter(of_server, RouterPolicy(), hold=hold, tenancy=tenancy, shadows=shadows)
            direct = await running.enter_async_context(serving(router, {each.name: each.url for each in backends}, ready))
            server = router.endpoint_picker(fallbacks)
            ports = await server.start("127.0.0.1", EppSettings(0, 0, secure))
            await server.begin_ready()
            running.push_async_callback(server.close, 0, asyncio.Event())
            before = await running.enter_async_context(envoy(tmp_path, ports, endpoints(backends), fail_open=fail_open))
            await before.sees(1)
            return Gateway(before, before.client, direct, server, ports)

        yield make


def endpoints(backends: Sequence[StubBackend]) -> list[str]:
    return [each.url.removeprefix("http://") for each in backends]


def subset(allowed: Sequence[str]) -> dict[str, str]:
    listed = Value(list_value=ListValue(values=[Value(string_value=endpoint) for endpoint in allowed]))
    return {SUBSET_HEADER: base64.b64encode(listed.SerializeToString()).decode()}


@pytest.mark.parametrize(("secure", "fallbacks"), [(True, 0), (False, 2)])
async def test_the_gateway_follows_the_pick(behind: Behind, backends: list[StubBackend], secure: bool, fallbacks: int) -> None:
    """Some gateways read one endpoint alone."""
    gateway = await behind(secure=secure, fallbacks=fallbacks)
    forged = {"X-Starling-Router": "forged", "X-Gateway-Destination-Endpoint": "192.0.2.1:80", "X-Mine": "1"}
    for session in ("a", "b"):  # each stays where it was first
        answers = [await gateway.client.post(CHAT, json=ASKED, headers={**forged, "X-Session-Token": session}) for _ in range(3)]
        seen = [answer.json()["headers"] for answer in answers]
        first, second = endpoints(backends) if session == "a" else endpoints(backends)[::-1]
        named = f"{first},{second}" if fallbacks else first
        assert [each["x-gateway-destination-endpoint"] for each in seen] == [named] * 3
        assert seen[0]["x-mine"] == "1" and "x-starling-router" not in seen[0] and json.loads(answers[0].json()["body"]) == ASKED
        assert not [name for name in answers[0].headers if name.startswith("x-gateway")]
    assert [len(each.paths) for each in backends] == [3, 3]
    assert (await gateway.client.get("/v1/models")).json()["method"] == "GET"
    assert "x-starling-route" not in answers[0].headers
    explained = await gateway.client.post(CHAT, json=ASKED, headers={"X-Starling-Explain": "1", "X-Session-Token": "b"})
    assert explained.headers["x-starling-route"] == "backend=chat-2-0; cached=0; reason=session"
    renamed = await gateway.client.post(CHAT, json=ASKED, headers={"X-Gateway-Model-Name-Rewrite": "an adapter of a long name"})
    assert json.loads(renamed.json()["body"]) == ASKED | {"model": "an adapter of a long name"}
    await gateway.all_ended()
    shown = (await gateway.direct.get("/metrics")).text
    assert 'llm_d_epp_request_ttft_seconds_count{model_name="m",target_model_name="m"} 9.0' in shown
    assert "llm_d_epp_ready_endpoints 2.0" in shown and 'picks_total{backend="chat-1-0",reason="session"} 2.0' in shown


async def test_tenants_are_told_and_their_quotas_hold(behind: Behind, backends: list[StubBackend], tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "batch").write_text("batch-key")
    (tmp_path / "tenants.yaml").write_text("[{name: batch, priority: 3, tokensPerMinute: 1000}]")
    (tmp_path / "token").write_text("the token")

    async def respond(request: web.Request) -> web.StreamResponse:
        shown = {name: value for name, value in request.headers.items() if name.startswith("x-starling")}
        return web.json_response({"headers": shown, "usage": {"prompt_tokens": 100, "completion_tokens": 30_000}})

    for backend in backends:
        backend.respond = respond
    tenancy = Tenancy.read(tmp_path / "tenants.yaml", None, 1)
    gateway = await behind(tenancy=tenancy, router_token=FileToken(tmp_path / "token"))
    assert (await gateway.client.post(CHAT, json=ASKED)).status_code == 401
    assert (await gateway.client.get("/backend/cache")).status_code == 404, "servers would tell it who shows the token"
    gateway.client.headers.update({"Authorization": "Bearer batch-key", "X-Starling-Tenant": "forged"})
    for path in ("/metrics", "/%68ealth"):
        assert (await gateway.client.get(path)).json()["headers"] == {}, "the token is for requests whose key was checked"
    first = await gateway.client.post(CHAT, json=ASKED)
    told = {"x-starling-router": "the token", "x-starling-tenant": "batch", "x-starling-priority": "3", "x-starling-lone": "yes"}
    assert (first.status_code, first.json()["headers"]) == (200, told)
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    await gateway.all_ended()
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * 4000}]}
    refused = await gateway.client.post(CHAT, json=long)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0" and refused.headers["retry-after"]
    assert "has 0 left" in refused.json()["error"]["message"], "its prompt, which is too long by itself, was not read"


async def test_bodies_pass_whole_and_are_bounded(behind: Behind, backends: list[StubBackend]) -> None:
    gateway = await behind(max_body_bytes=8 << 20)
    body = bytes(range(97, 123)) * 322_638  # some 8 MiB, which no chunk divides
    assert (await gateway.client.post(CHAT, content=body)).json()["body"].encode() == body
    asked = len(backends[0].paths) + len(backends[1].paths)

    async def pieces() -> AsyncIterator[bytes]:
        yield body
        yield b"x" * 100

    answer = await gateway.client.post(CHAT, content=pieces())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n"
    reader, writer = await asyncio.open_connection(gateway.client.base_url.host, gateway.client.base_url.port)
    writer.write(head.encode())  # the length alone gets the answer
    assert b" 413 " in await reader.readline()
    writer.close()
    assert len(backends[0].paths) + len(backends[1].paths) == asked


async def test_refusals_are_in_the_form_of_their_api(behind: Behind, backends: list[StubBackend]) -> None:
    gateway = await behind(api_keys=ApiKeys(["right"]), hold=HOLD)
    gateway.client.headers["Authorization"] = "Bearer wrong"
    answer = await gateway.client.post(CHAT, json=ASKED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = await gateway.client.post("/v1/messages", json=ASKED)
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "authentication_error")
    gateway.client.headers["Authorization"] = "Bearer right"
    for backend in backends:
        backend.respond = refuse(404)
    answer = await gateway.client.post(CHAT, json=ASKED)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "refused with 404")
    answer = await gateway.client.post(CHAT, json=ASKED, headers=subset([]))
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "no_backend", "5")
    answer = await gateway.client.post(CHAT, json=ASKED, headers=subset(["192.0.2.1:80"]))
    assert answer.status_code == 503
    backends[1].respond = stream(1)
    for _ in range(3):
        assert (await gateway.client.post(CHAT, json=ASKED, headers=subset(endpoints(backends)[1:]))).text == "data: 0\n\n"


def full(_: web.Request) -> Awaitable[web.StreamResponse]:
    error = {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}

    async def respond() -> web.StreamResponse:
        return web.json_response({"error": error}, status=429, headers={"Retry-After": "1"})

    return respond()


async def test_full_endpoints_shed_and_those_that_are_not_ready_let_wait(behind: Behind, backends: list[StubBackend]) -> None:
    gateway = await behind(hold=HOLD)
    for backend in backends:
        backend.state = backend.state.model_copy(update={"ready": False})

    async def none_is_ready() -> bool:
        return await metric(gateway.direct, "router_ready") == 0

    await until(none_is_ready, "no backend to be ready", 20)
    waits = asyncio.create_task(gateway.client.post(CHAT, json=ASKED))

    async def one_waits() -> bool:
        return await metric(gateway.direct, "router_held_requests") == 1

    await until(one_waits, "a request to wait", 20)
    answer = await gateway.client.post(CHAT, json=ASKED)  # one more than may wait
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    backends[0].state = backends[0].state.model_copy(update={"ready": True})
    assert (await waits).status_code == 200
    backends[0].respond = full
    answers = await asyncio.gather(*(gateway.client.post(CHAT, json=ASKED) for _ in range(6)))
    assert {answer.status_code for answer in answers} == {429}
    assert {answer.json()["error"]["code"] for answer in answers} == {"queue_full"}


async def test_a_stream_passes_piece_by_piece(behind: Behind, backends: list[StubBackend]) -> None:
    stepwise = Stepwise(20)
    for backend in backends:
        backend.respond = stepwise.respond
    gateway = await behind()
    async with gateway.client.stream("POST", CHAT, json={**ASKED, "stream": True}) as answer:
        chunks = await stepwise.chunks(answer)
    assert b"".join(chunks) == b"".join(b"data: %d\n\n" % i for i in range(20))


async def test_a_client_that_goes_away_frees_its_endpoint(behind: Behind, backends: list[StubBackend]) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: x\n\n")
            await asyncio.sleep(0.01)

    for backend in backends:
        backend.respond = endless
    gateway = await behind()
    async with gateway.client.stream("POST", CHAT, json=ASKED) as answer:
        async for _ in answer.aiter_raw():
            break
        assert await gateway.open() == 1
    await gateway.all_ended()


async def test_a_request_counts_at_the_endpoint_that_served_it(behind: Behind, backends: list[StubBackend]) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        begun.set()
        await may_end.wait()
        return response

    backends[0].respond, backends[1].respond = refuse(503), wait
    gateway = await behind()
    asked = asyncio.create_task(gateway.client.post(CHAT, json=ASKED))  # the gateway tries the second one, too
    await begun.wait()

    async def is_there() -> bool:
        shown = (await gateway.direct.get("/metrics")).text
        return all(f'open_requests{{backend="chat-{each}-0"}} {count}' in shown for each, count in ((1, 0.0), (2, 1.0)))

    await until(is_there, "the request to be counted where it is served", 20)
    may_end.set()
    assert (await asked).status_code == 200
    await gateway.all_ended()


@pytest.mark.parametrize("fail_open", [True, False])
async def test_without_a_picker_the_gateway_answers_as_it_is_set_up(behind: Behind, fail_open: bool) -> None:
    gateway = await behind(fail_open=fail_open)
    assert (await gateway.client.post(CHAT, json=ASKED)).status_code == 200
    await gateway.server.close(0, asyncio.Event())
    await gateway.envoy.sees(0)
    answers = [await gateway.client.post(CHAT, json=ASKED) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200 if fail_open else 503}
    if fail_open:
        assert [json.loads(answer.json()["body"]) for answer in answers] == [ASKED] * 8


@pytest.mark.parametrize("fail_open", [True, False])
async def test_agents_behind_a_gateway_let_nobody_in_without_a_key(
    behind: Behind, backends: list[StubBackend], tmp_path: Path, fail_open: bool
) -> None:
    """They answer routers, and what routers picked for, alone; and where the gateway fails open, all who have a key."""
    (tmp_path / "token").write_text("the token")
    token, keys = FileToken(tmp_path / "token"), ApiKeys(["mine"])
    rule = RoutersOnly(token, 1, closed=False)
    rule.set(not fail_open)
    checks = ServerSettings(access_log=False, api_keys=keys, router_token=token, routers_only=rule)
    agent = httpx.ASGITransport(with_middleware(PlainTextResponse("served"), checks, Drain(), Counter()))

    async def respond(request: web.Request) -> web.StreamResponse:
        async with httpx.AsyncClient(transport=agent, base_url="http://agent") as client:
            answer = await client.request(
                request.method, request.path, headers=[*request.headers.items()], content=await request.read()
            )
        return web.Response(status=answer.status_code, body=answer.content)

    for backend in backends:
        backend.respond = respond
    gateway = await behind(fail_open=fail_open, api_keys=keys, router_token=token)

    async def asked(client: httpx.AsyncClient, url: str = "") -> list[int]:
        headers: list[dict[str, str]] = [{"Authorization": "Bearer mine"}, {"Authorization": "Bearer other"}, {}]
        return [(await client.post(url + CHAT, json=ASKED, headers=each)).status_code for each in headers]

    assert await asked(gateway.client) == [200, 401, 401]
    await gateway.server.close(0, asyncio.Event())
    await gateway.envoy.sees(0)
    assert await asked(gateway.client) == ([200, 401, 401] if fail_open else [503] * 3)
    assert await asked(gateway.direct, backends[0].url) == ([200, 401, 401] if fail_open else [403] * 3)


@pytest.mark.parametrize("fail_open", [True, False])
async def test_a_picker_that_hangs_is_none(backends: list[StubBackend], tmp_path: Path, fail_open: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        ports = EppSettings(silent.getsockname()[1], silent.getsockname()[1])
        async with envoy(tmp_path, ports, endpoints(backends), fail_open=fail_open, probe_seconds=0.5) as gateway:
            await gateway.sees(0)
            answers = [await gateway.client.post(CHAT, json=ASKED) for _ in range(4)]
    assert {answer.status_code for answer in answers} == {200 if fail_open else 503}


async def test_models_are_listed_while_no_server_is_ready(behind: Behind, backends: list[StubBackend], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of the routers")
    for backend in backends:
        backend.state = backend.state.model_copy(update={"ready": False})
    gateway = await behind(ready=0, router_token=FileToken(tmp_path / "token"))
    assert (await gateway.client.get("/v1/models")).status_code == 503
    told = {"models": ["m", "big/m"]}
    await gateway.direct.post("/router/report", json=told, headers={"x-starling-router": "of the routers"})
    assert [card["id"] for card in (await gateway.client.get("/v1/models")).json()["data"]] == ["m", "big/m"]
    assert (await gateway.client.get("/v1/models/other")).status_code == 404
    assert (await gateway.client.post(CHAT, json=ASKED)).status_code == 503


async def test_the_gateway_follows_the_canary(behind: Behind, backends: list[StubBackend], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of the routers")
    for each, revision in zip(backends, ("old", "new"), strict=True):
        each.state = each.state.model_copy(update={"revision": revision})
    gateway = await behind(router_token=FileToken(tmp_path / "token"), shadows=ShadowPolicy(share=1.0))

    async def tell(weight: int, compare: str = "slo") -> dict[str, Any]:
        notice = {"canary": {"stable": "old", "canary": "new", "weight": weight, "compare": compare}}
        answer = await gateway.direct.post("/router/report", json=notice, headers={"x-starling-router": "of the routers"})
        return dict(answer.json()["canary"])

    for weight, counted in ((100, "tried"), (0, "stable")):
        before = (await tell(weight))[counted]["requests"]
        for _ in range(3):
            assert (await gateway.client.post(CHAT, json=ASKED)).status_code == 200

        async def all_count(weight: int = weight, counted: str = counted, before: int = before) -> bool:
            return bool((await tell(weight))[counted]["requests"] == before + 3)

        await until(all_count, "the requests to be counted")
    assert len(backends[1].paths) == 3 and len(backends[0].paths) == 3
    for each in backends:
        each.respond = refuse(503)  # it ends, which is no error of its revision
    await tell(100)
    assert (await gateway.client.post(CHAT, json=ASKED)).status_code == 503

    async def counts() -> list[int]:
        both = await tell(100)
        return [both["tried"][name] + both["stable"][name] for name in ("placed", "requests", "errors")]

    async def is_counted() -> bool:  # once its end has come, which says why
        return (await counts())[1] == 7

    await until(is_counted, "the refusal to be counted")
    assert await counts() == [7, 7, 0]
    for each in backends:
        each.respond = echo
        each.paths.clear()
    await tell(0, "tokens")

    async def has_shadow() -> bool:
        """Backends that have just refused get no shadows."""
        assert (await gateway.client.post(CHAT, json=ASKED)).status_code == 200
        return len(backends[1].paths) > 0

    await until(has_shadow, "the canary to be asked for the router's own comparison")
