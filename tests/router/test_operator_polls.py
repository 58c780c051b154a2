"""What a router and the operator tell each other, and what clients hear of it while no server is ready."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Route
from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_agent.openai import chat, completions, embeddings, models, probes, scoring, tokens
from starling_agent.openai.anthropic import routes as anthropic_routes
from starling_agent.openai.responses import routes as responses_routes
from starling_router import demand, service_state
from starling_router.client_requests import MODEL_PATHS, TOKENIZER_PATHS, is_known
from starling_router.hold_queue import HoldPolicy

from tests.router.backends import StubBackend
from tests.router.conftest import TOKEN
from tests.router.serving import Start
from tests.router.test_hold import until_held
from tests.waiting import until

CHAT, PATH = "/v1/chat/completions", "/router/report"
BODY = {"model": "m", "messages": []}
WAKING = {
    "models": ["m", "big/m"],
    "phase": "Progressing",
    "message": "0 of 1 groups serve; chat-1-0: downloading 3.2/7.6 GB",
    "eta_seconds": 41.2,
}


@pytest.fixture
def unready(backends: list[StubBackend]) -> None:
    for backend in backends:
        backend.state = backend.state.model_copy(update={"ready": False})


@pytest.fixture
async def client(start: Start, unready: None, token: FileToken) -> httpx.AsyncClient:  # noqa: ARG001
    """A client of a router whose servers are not ready. It holds requests for a moment."""
    return await start(ready=0, hold=HoldPolicy(seconds=0.3, first_comment_seconds=0.1), router_token=token)


async def poll(client: httpx.AsyncClient, known: dict[str, Any] | None = None, **notice: Any) -> dict[str, Any]:
    """Polls as the operator does; with a report that is known it waits for the next one."""
    query = {} if known is None else {"after": known["version"], "incarnation": known["incarnation"], "wait": 50}
    answer = await client.post(PATH, params=query, json=notice, headers={ROUTER_TOKEN: TOKEN})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_who_has_no_token_learns_and_tells_nothing(client: httpx.AsyncClient) -> None:
    for headers in ({}, {ROUTER_TOKEN: "other"}):
        answer = await client.post(PATH, json=WAKING, headers=headers)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "operator_only"
    assert "downloading" not in (await client.post(CHAT, json=BODY)).text
    wrong = await client.post(PATH, json={"models": 3}, headers={ROUTER_TOKEN: TOKEN})
    assert wrong.status_code == 400 and "models" in wrong.json()["error"]["message"]


async def test_who_waited_in_vain_hears_the_phase_and_when_to_come_again(client: httpx.AsyncClient) -> None:
    await poll(client, **WAKING)
    answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_backend"
    text = f"no server took this request in 0.3 s: of 2 servers 2 are not ready; Progressing: {WAKING['message']}"
    assert answer.json()["error"]["message"] == f"{text}; try again in about 42 s"
    assert answer.headers["Retry-After"] == "42" and answer.headers[service_state.PHASE] == "Progressing"
    streamed = await client.post(CHAT, json=BODY | {"stream": True})
    assert streamed.status_code == 200 and streamed.text.startswith(": waiting\n\n") and text in streamed.text
    at_once = await client.get("/v1/responses/resp_1")
    assert at_once.status_code == 503 and "downloading" in at_once.text


async def test_paths_that_need_no_key_tell_the_phase_alone(client: httpx.AsyncClient) -> None:
    await poll(client, **WAKING)
    for path in ("/ready", "/docs", "/load"):
        answer = await client.get(path)
        text = "no group of this service accepts requests now; Progressing; try again in about 42 s"
        assert answer.status_code == 503 and answer.json()["error"]["message"] == text


async def test_what_an_operator_said_that_is_gone_is_not_repeated(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await poll(client, **WAKING)
    monkeypatch.setattr(service_state, "KEPT_SECONDS", 0.0)
    answer = await client.get("/v1/responses/resp_1")
    assert "downloading" not in answer.text and answer.headers["Retry-After"] == "5"


async def test_a_request_is_news_and_so_is_the_quiet_after_it(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "QUIET_SECONDS", 0.05)
    first = await poll(client)
    assert first["open"] == 0 and first["quiet_seconds"] >= 0
    for _ in range(2):
        waits = asyncio.create_task(poll(client, first))
        request = asyncio.create_task(client.post(CHAT, json=BODY))
        busy = await waits
        assert busy["open"] == 1 and busy["quiet_seconds"] is None and busy["version"] > first["version"]
        assert (await request).status_code == 503
        first = await poll(client, busy)
        assert first["open"] == 0 and first["quiet_seconds"] >= 0.05


@pytest.mark.usefixtures("unready")
async def test_those_that_wait_are_counted(start: Start, token: FileToken) -> None:
    client = await start(ready=0, hold=HoldPolicy(seconds=600.0), router_token=token)
    requests = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(3)]
    await until_held(client, 3)
    report = await poll(client)
    assert (report["open"], report["held"]) == (3, 3)
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)


async def test_probes_lists_and_an_agents_proof_are_no_requests(client: httpx.AsyncClient) -> None:
    first = await poll(client, **WAKING)
    for path in ("/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/m", "/v1/responses/r"):
        await client.get(path)
    proof = {ROUTER_TOKEN: TOKEN, "x-starling-pod": "chat-1-0"}
    assert (await client.post(CHAT, json=BODY, headers=proof)).status_code == 503
    after = await poll(client, **WAKING)
    assert after["version"] == first["version"] and after["quiet_seconds"] is not None


async def test_models_are_listed_while_no_server_is_ready(client: httpx.AsyncClient, backends: list[StubBackend]) -> None:
    assert (await client.get("/v1/models")).status_code == 503
    await poll(client, **WAKING)
    await poll(client)  # of an operator that has just begun
    listed = await client.get("/v1/models")
    assert listed.json()["object"] == "list" and [card["id"] for card in listed.json()["data"]] == ["m", "big/m"]
    assert (await client.get("/v1/models/big/m")).json()["id"] == "big/m"
    missing = await client.get("/v1/models/other")
    assert missing.status_code == 404 and "this service has m, big/m" in missing.json()["error"]["message"]
    page = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
    assert page["first_id"] == "m" and page["data"][0]["display_name"] == "m" and page["has_more"] is False
    backends[0].state = backends[0].state.model_copy(update={"ready": True})

    async def comes_from_a_server() -> bool:
        return "path" in (await client.get("/v1/models")).json()

    await until(comes_from_a_server, "the server to list its models itself")


async def test_what_needs_no_key_wakes_nothing_whatever_its_method(client: httpx.AsyncClient) -> None:
    before = await poll(client)
    for path in ("/load", "/docs", "/openapi.json"):
        assert (await client.post(path, json=BODY)).status_code == 503
    assert (await poll(client))["quiet_seconds"] >= before["quiet_seconds"]


async def test_what_no_server_has_or_nobody_computes_wakes_nothing(client: httpx.AsyncClient) -> None:
    before = await poll(client)
    asked = {"/nonsense": 404, "/v1/chat": 404, "/v1/responses/compact": 503, "/v1/responses/resp_1/cancel": 503}
    for path, status in asked.items():
        answer = await client.post(path, json=BODY)
        assert (answer.status_code, path) == (status, path)
    missing = await client.get("/nonsense")
    assert missing.status_code == 404 and missing.json()["error"]["message"] == "there is no /nonsense"
    assert (await poll(client))["quiet_seconds"] >= before["quiet_seconds"]
    await client.post("/v1/messages/count_tokens", json=BODY)  # a server alone has the tokenizer
    assert (await poll(client))["version"] > before["version"]


def test_each_route_of_servers_is_known_and_wakes_them_or_does_not() -> None:
    modules = (chat, responses_routes, anthropic_routes, completions, embeddings, scoring, models, tokens, probes)
    routes = [route for module in modules for route in module.router.routes if isinstance(route, APIRoute)]
    sent_on = [route for route in routes if not route.path.startswith("/backend")]
    assert all(is_known(route.path.split("{")[0] + "x" * ("{" in route.path)) for route in sent_on)
    posts = {route.path for route in routes if "POST" in route.methods}
    assert posts - {"/ping", "/v1/responses/compact", "/v1/responses/{response_id}/cancel"} == MODEL_PATHS | TOKENIZER_PATHS
    bare = FastAPI()  # with pages of its own
    assert all(is_known(route.path) for route in bare.routes if isinstance(route, Route))
