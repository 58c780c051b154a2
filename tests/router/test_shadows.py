"""A canary whose tokens are not the stable revision's is found out by shadows, which touch no client."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from starling_agent.contract.router import PRIORITY, ROUTER_TOKEN, SHADOW, TENANT
from starling_agent.file_token import FileToken
from starling_agent.settings import ServerSettings
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter
from starling_router.shadow_tokens import CHAT, COMPLETIONS, NEAR_TIE, ShadowAnswer, difference, shadow_body
from starling_router.shadows import ShadowPolicy
from starling_router.tenants import Tenancy, Tenant, TenantKeys

from tests.agent.conftest import LiveServer, StartServer
from tests.agent.conftest import start_server as start_server
from tests.router.backends import Respond, StubBackend, refuse
from tests.router.serving import metric, serving
from tests.waiting import until

MESSAGES = [{"role": "user", "content": "How do I read a file?"}]
CLIENT = {"model": "pydoc", "max_tokens": 8, "temperature": 0.7}
Edit = Callable[[dict[str, Any]], dict[str, Any]]


# ---- the question ----


def asked(path: str, tops: bool = True, **fields: Any) -> dict[str, Any] | None:
    body = shadow_body(path, json.dumps(CLIENT | fields).encode(), tops=tops)
    return None if body is None else dict(json.loads(body))


def test_a_shadow_has_the_prompt_and_nothing_else_of_a_request() -> None:
    of_chat = asked(CHAT, messages=MESSAGES, n=3, presence_penalty=1, stop="x", stream=True, user="me", reasoning_effort="low")
    assert of_chat is not None and of_chat["messages"] == MESSAGES and of_chat["reasoning_effort"] == "low"
    assert of_chat["temperature"] == 0 and of_chat["max_tokens"] == 8 and of_chat["logprobs"] is True
    assert of_chat.keys().isdisjoint({"n", "presence_penalty", "stop", "stream", "user"})
    of_text = asked(COMPLETIONS, tops=False, prompt=[1, 2], max_tokens=5000)
    assert of_text is not None and of_text["prompt"] == [1, 2] and of_text["max_tokens"] == 64 and "logprobs" not in of_text


def test_tools_that_a_model_is_not_shown_are_no_part_of_its_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown, hidden = asked(CHAT, messages=MESSAGES, tools=tools), asked(CHAT, messages=MESSAGES, tools=tools, tool_choice="none")
    assert shown is not None and shown["tools"] == tools and hidden is not None and "tools" not in hidden


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (CHAT, {"messages": 3}),
        (COMPLETIONS, {"prompt": ["two", "prompts"]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_what_is_no_single_text_has_no_shadow(path: str, fields: dict[str, Any]) -> None:
    assert asked(path, **fields) is None
    assert shadow_body(path, b"{", tops=True) is None


# ---- the comparison ----

RIGHT = ShadowAnswer([1, 2], [5, 6, 7], [{5: -0.1}, {6: -1.0, 8: -1.0 - NEAR_TIE, 9: -1.01 - NEAR_TIE}, {7: -0.1}])


@pytest.mark.parametrize(
    ("prompt", "tokens", "of_float32", "of_bfloat16"),
    [
        ([1, 2], [5, 6, 7], "", ""),
        ([1, 2], [5, 8, 3], "token 1 of an answer is 8 in place of 6", ""),
        ([1, 2], [5, 9, 7], "token 1 of an answer is 9 in place of 6", "whose log probability is lower by 0.260"),
        ([1, 2], [5, 4, 7], "token 1 of an answer is 4 in place of 6", "not among the 5 likeliest"),
        ([1, 2], [5, 6], "token 2 of an answer is none in place of 7", "not among the 5 likeliest"),
        ([1, 2], [5, 6, 7, 8], "token 3 of an answer is 8 in place of none", "not among the 5 likeliest"),
        ([1, 3], [5, 6, 7], "token 1 of the prompt is 3 in place of 2", "token 1 of the prompt is 3 in place of 2"),
    ],
)
def test_the_first_token_that_differs_counts(prompt: list[int], tokens: list[int], of_float32: str, of_bfloat16: str) -> None:
    tried = ShadowAnswer(prompt, tokens)
    assert difference(RIGHT, tried, exact=True) == of_float32
    found = difference(RIGHT, tried, exact=False)
    assert (of_bfloat16 in found) if of_bfloat16 else not found


# ---- with a real server ----


@pytest.fixture(scope="module")
def agent(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[LiveServer, FileToken]:
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("of the routers")
    flags = ("--served-model-name=pydoc", "--kv-cache-memory-bytes=64MiB", "--num-threads=1", "--dtype=float32")
    server = start_server(*flags, "--rate-limit=12/3600s", "--scheduling-policy=priority", f"--router-token-file={token}")
    return server, FileToken(token)


class Canary:
    """A router before two revisions, both of which are one real server. `edit` changes what the canary is asked, `edit_stable` what
    the stable revision is.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.edit: Edit = lambda body: body
        self.edit_stable: Edit = lambda body: body
        self.asked: dict[str, list[tuple[dict[str, str], dict[str, Any]]]] = {"old": [], "new": []}
        self._url, self._session = url, session
        self.servers = [StubBackend(name) for name in ("old", "new")]
        for server in self.servers:
            server.state = server.state.model_copy(update={"revision": server.name})
            server.respond = self._forward(server.name)
        self.new = self.servers[1]
        self.client = httpx.AsyncClient()
        self.answer = httpx.Response(200)
        """The last one that a client got."""

    def _forward(self, revision: str) -> Respond:
        async def respond(request: web.Request) -> web.StreamResponse:
            body, headers = await request.json(), {name.lower(): value for name, value in request.headers.items()}
            self.asked[revision].append((headers, body))
            body = (self.edit if revision == "new" else self.edit_stable)(body)
            kept = {name: value for name, value in headers.items() if name.startswith("x-")}
            async with self._session.post(self._url + request.path, json=body, headers=kept) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

        return respond

    async def report(self, **notice: Any) -> dict[str, Any]:
        told = {"stable": "old", "canary": "new", "weight": 0, "compare": "tokens", "exact": True} | notice
        answer = await self.client.post("/router/report", json={"canary": told}, headers={ROUTER_TOKEN: "of the routers"})
        return dict(answer.json()["canary"])

    async def compare(self, path: str, body: dict[str, Any], **notice: Any) -> dict[str, Any]:
        """Returns the report once one request has had its shadows. The client's answer is the stable revision's."""
        before = await self.report(**notice)
        self.answer = await self.client.post(path, json=CLIENT | body)
        assert self.answer.status_code == 200, self.answer.text
        after = before

        async def is_told() -> bool:
            nonlocal after
            after = await self.report(**notice)
            return bool(after["tried"]["requests"] > before["tried"]["requests"])

        await until(is_told, "a shadow to be counted")
        return after


@pytest.fixture
async def canary(agent: tuple[LiveServer, FileToken], tmp_path: Path) -> AsyncIterator[Canary]:
    server, token = agent
    async with AsyncExitStack() as running:
        made = Canary(server.url, await running.enter_async_context(aiohttp.ClientSession()))
        for each in made.servers:
            await each.start()
            running.push_async_callback(each.close)
        tenant = Tenant("chat", priority=3, keys="chat")
        (tmp_path / "chat").write_text("chat-key")
        settings, tenancy = ServerSettings(access_log=False, router_token=token), Tenancy([tenant], TenantKeys([tenant], tmp_path))
        router = ServiceRouter(settings, RouterPolicy(), tenancy=tenancy, shadows=ShadowPolicy(share=1.0))
        made.client = await running.enter_async_context(serving(router, {each.name: each.url for each in made.servers}, 2))
        made.client.headers["Authorization"] = "Bearer chat-key"
        yield made


async def test_a_canary_that_answers_the_same_is_compared_and_one_that_does_not_is_told(canary: Canary) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "import os\n", "stream": True})):
        report = await canary.compare(path, body)
    assert (report["compared"], report["differing"], report["tried"]["errors"]) == (2, 0, 0)
    (of_client, _), (of_shadow, _), *_ = canary.asked["old"]
    assert SHADOW not in of_client and int(of_client[PRIORITY]) == 3 and of_shadow[TENANT] == of_client[TENANT] == "chat"
    assert of_shadow[SHADOW] == "yes" and int(of_shadow[PRIORITY]) < -1000
    assert all(headers[SHADOW] == "yes" for headers, _ in canary.asked["new"])  # the client had none of the canary
    await canary.compare(CHAT, {"messages": MESSAGES, "temperature": 0, "return_token_ids": True})
    usual = canary.answer.json()["choices"][0]["token_ids"]
    canary.edit = lambda body: body | {"logit_bias": {str(usual[2]): -100}}
    for exact in (True, False):
        await canary.report(canary="none")
        report = await canary.compare(CHAT, {"messages": MESSAGES}, exact=exact)
        assert "token 2 of an answer is" in report["difference"] and f"in place of {usual[2]}" in report["difference"]
    of_clients = sum(SHADOW not in headers for headers, _ in canary.asked["old"])
    assert await metric(canary.client, "router_tenant_requests_total") == of_clients == 5


async def test_a_stable_revision_that_does_not_repeat_its_answer_says_nothing_of_the_canary(canary: Canary) -> None:
    await canary.compare(CHAT, {"messages": MESSAGES, "temperature": 0, "return_token_ids": True})
    first, second = canary.answer.json()["choices"][0]["token_ids"][1:3]

    def bans(token: int) -> Edit:
        return lambda body: body | {"logit_bias": {str(token): -100}}

    canary.edit = bans(second)
    edits = iter([canary.edit_stable, bans(first)])
    canary.edit_stable = lambda body: next(edits)(body) if body["temperature"] == 0 else body
    report = await canary.compare(CHAT, {"messages": MESSAGES})
    assert (report["tried"]["requests"], report["compared"], report["differing"]) == (2, 1, 0)


async def test_a_shadow_that_fails_is_the_canarys_error_alone(canary: Canary) -> None:
    canary.new.respond = refuse(500)
    report = await canary.compare(COMPLETIONS, {"prompt": "x"})
    assert (report["tried"]["errors"], report["compared"], report["stable"]["errors"]) == (1, 0, 0)


async def test_errors_and_times_alone_need_no_shadow(canary: Canary) -> None:
    await canary.report(compare="slo")
    for _ in range(2):
        await canary.client.post(COMPLETIONS, json=CLIENT | {"prompt": "x"})
    assert len(canary.asked["old"]) == 2 and not canary.asked["new"]
