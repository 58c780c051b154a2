"""Prompts as the engine's own blocks: what the router expects in a server's cache is what the server finds there."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starling_agent.contract.backend import BackendState
from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_agent.settings import ServerSettings
from starling_router.events import CachedBlocks
from starling_router.exact import ExactPrompts
from starling_router.picker import RouterPolicy
from starling_router.prompt import RoutedPrompt, read_body
from starling_router.router import ServiceRouter

from tests.agent.conftest import MODEL, REPOSITORY, StartServer
from tests.agent.conftest import start_server as start_server
from tests.router.conftest import TOKEN
from tests.router.serving import metric, serving
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEYS = ("one", "two")
FLAGS = ("--served-model-name=pydoc", "--kv-cache-memory-bytes=64MiB", "--num-threads=1", "--accept-seconds=0")
BLOCK = 16
USED = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens")
"""The names of what an answer says of its tokens, in any API; what is missing there is in another one."""
Ask = Callable[..., Awaitable[tuple[str, int, int]]]
STATE = BackendState(ready=True, open=0, models=["pydoc"], block_size=BLOCK)
TEXT = "Explain how a generator expression differs from a list comprehension. " * 6


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    return file


@pytest.fixture(scope="module")
def urls(start_server: StartServer, token: Path) -> dict[str, str]:
    flags = (*FLAGS, *(f"--api-key={key}" for key in KEYS), f"--router-token-file={token}")
    return {name: start_server(*flags, api_key="one").url for name in ("a", "b")}


@asynccontextmanager
async def routed(router: ServiceRouter, urls: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a router once it reads prompts as blocks."""
    async with serving(router, urls, len(urls)) as client:

        async def reads_blocks() -> bool:
            probe = {"model": "pydoc", "prompt": "x", "max_tokens": 1}
            await client.post("/v1/completions", headers={"Authorization": "Bearer one"}, json=probe)
            return await metric(client, "router_exact_prompts_total") > 0

        await until(reads_blocks, "the model's tokenizer")
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(token: Path) -> ServiceRouter:
    """The servers tell it their tokenizer."""
    return ServiceRouter(ServerSettings(access_log=False, router_token=FileToken(token)), RouterPolicy(), lambda: "one")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(router: ServiceRouter, urls: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with routed(router, urls) as client:
        yield client


@pytest.fixture
def ask(router: ServiceRouter, client: httpx.AsyncClient) -> Ask:
    return partial(asked, client, router._watch._cached)


async def asked(client: httpx.AsyncClient, cached: CachedBlocks, path: str, key: str = "one", **body: Any) -> tuple[str, int, int]:
    """Returns the backend, the tokens that the router expected in its cache, and those that it found there.

    By then the router knows what the backend has cached of the answer.
    """
    known = blocks_of(cached)
    backend, expected, found, used = await answered(client, path, key, **body)
    new = (used - 1 - found) // BLOCK  # the last token is in no cache

    async def are_told() -> bool:
        return blocks_of(cached) >= known + new

    await until(are_told, f"{new} blocks to be told of")
    return backend, expected, found


async def answered(client: httpx.AsyncClient, path: str, key: str = "one", **body: Any) -> tuple[str, int, int, int]:
    """Returns the backend, the tokens that the router expected in its cache, those that it found there, and all of the request."""
    headers = {"Authorization": f"Bearer {key}", "X-Starling-Explain": "1"}
    answer = await client.post(path, headers=headers, json={"model": "pydoc", **body})
    assert answer.status_code == 200, answer.text
    route = re.fullmatch(r"backend=(.*); cached=(\d+); reason=\w+", answer.headers["x-starling-route"])
    assert route is not None
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    found = details["cached_tokens"] if "cached_tokens" in details else usage["cache_read_input_tokens"]
    return route[1], int(route[2]), found, sum(usage.get(name, 0) for name in USED)


def blocks_of(cached: CachedBlocks) -> int:
    return sum(index.count(core) for index in cached.indexes for core in cached.backends)


def chat(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [
        ("/v1/chat/completions", {"messages": chat(f"A {TEXT}")}, {"messages": chat(f"A {TEXT}", "Yes.", "And tuples?")}),
        ("/v1/completions", {"prompt": f"B {TEXT}"}, {"prompt": f"B {TEXT} And tuples?"}),
        ("/v1/messages", {"messages": chat(f"C {TEXT}")}, {"messages": chat(f"C {TEXT}", "Yes.", "And tuples?")}),
        ("/v1/responses", {"input": f"D {TEXT}"}, {"input": chat(f"D {TEXT}", "Yes.", "And tuples?")}),
    ],
)
async def test_what_is_expected_is_found(ask: Ask, path: str, first: Any, second: Any) -> None:
    limit = {"max_output_tokens" if path.endswith("responses") else "max_tokens": 16}
    backend, expected, found = await ask(path, **first, **limit)
    assert expected == found < 64  # a chat's first words are those of others
    again, expected, found = await ask(path, **second, **limit)
    assert again == backend and expected == found >= 64
    _, expected, found = await ask(path, key="two", **second, **limit)
    assert expected == found < 64


async def test_the_next_turn_goes_where_the_last_one_was(ask: Ask) -> None:
    """The other server is as idle, and would be next in turn."""
    talks = [await ask("/v1/chat/completions", messages=chat(f"{i} {TEXT}"), max_tokens=4) for i in range(4)]
    assert {backend for backend, _, _ in talks} == {"a", "b"}
    for i in (2, 0, 3, 1):
        turn = chat(f"{i} {TEXT}", "Yes.", "And?")
        backend, expected, found = await ask("/v1/chat/completions", messages=turn, max_tokens=4)
        assert backend == talks[i][0] and expected == found >= 64


async def test_a_tokenizer_that_is_given(urls: dict[str, str], token: Path) -> None:
    settings = ServerSettings(access_log=False, router_token=FileToken(token))
    router = ServiceRouter(settings, RouterPolicy(), lambda: "one", ExactPrompts.load(REPOSITORY / MODEL, settings))
    async with routed(router, urls) as client:
        ask = partial(asked, client, router._watch._cached, "/v1/completions", prompt=f"E {TEXT}", max_tokens=1)
        await ask()

        async def is_expected() -> bool:  # what the servers had before it came is still on its way
            _, expected, found = await ask()
            return expected == found >= 64

        await until(is_expected, "the prompt to be expected where it is")


async def test_several_prompts_of_one_request_all_count() -> None:
    exact = ExactPrompts.load(REPOSITORY / MODEL, ServerSettings())
    scope, state = {"path": "/v1/completions", "headers": [], "state": {"request_id": "r"}}, STATE

    async def read(prompt: Any) -> RoutedPrompt:
        body = json.dumps({"model": "pydoc", "prompt": prompt}).encode()
        found = await exact.read(scope, body, read_body(body), state)
        assert found is not None
        return found

    one, two = await read([[7] * 40]), await read([[7] * 40, [8] * 30])
    assert (one.tokens, two.tokens) == (40, 70) and two.blocks == one.blocks
    assert len((await read([[7] * 48])).blocks) == 2, "the last token is computed in any case"


async def test_who_has_a_key_alone_is_not_told_what_is_cached(urls: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=urls["a"], headers={"Authorization": "Bearer one"}) as client:
        described = (await client.get("/openapi.json")).json()["paths"]["/backend/cache"]["get"]["responses"]
        assert "application/jsonl" in described["200"]["content"] and "403" in described
        assert (await client.get("/backend/cache")).json()["error"]["code"] == "routers_only"
        assert (await client.get("/backend/cache", headers={ROUTER_TOKEN: "a guess"})).status_code == 403
        async with client.stream("GET", "/backend/cache", headers={ROUTER_TOKEN: TOKEN}) as answer:
            assert json.loads(await anext(answer.aiter_lines())) == {"changes": {"anew": True}}


class Way:
    """A way to a server, which may be blocked, and lead to another one."""

    def __init__(self, url: str) -> None:
        self.url, self.is_blocked = httpx.URL(url), False
        self._ends = set[asyncio.StreamWriter]()
        self._carrying = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._carry, "127.0.0.1", 0) as server:
            try:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            finally:
                self.block()
                await asyncio.gather(*self._carrying)

    def block(self) -> None:
        self.is_blocked = True
        for end in self._ends:
            end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends, task = {writer}, asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        with suppress(OSError):
            if not self.is_blocked:
                there, to = await asyncio.open_connection(self.url.host, self.url.port)
                ends.add(to)
                self._ends |= ends
                await asyncio.gather(_copy(reader, to), _copy(there, writer))
        for end in ends:
            end.transport.abort()
        self._ends -= ends


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.transport.abort()


async def test_after_a_gap_and_after_a_restart_prefixes_are_found_exactly(
    start_server: StartServer, urls: dict[str, str], token: Path
) -> None:
    """What a server cached in the gap is known then; of one that took another's place, what this one has."""
    prompts: list[dict[str, Any]] = [{"prompt": f"{name} {TEXT}", "max_tokens": 1} for name in "FG"]
    server = start_server(*FLAGS, "--api-key=one", f"--router-token-file={token}", api_key="one")
    settings = ServerSettings(access_log=False, router_token=FileToken(token))
    router, way = ServiceRouter(settings, RouterPolicy(), lambda: "one"), Way(server.url)
    cached = router._watch._cached

    async def is_followed(expected: bool, blocks: int = 0) -> None:
        async def holds() -> bool:
            is_exact = any(router.learned.get(state.prompting) for state in router._watch.followed())
            return is_exact == expected and blocks_of(cached) >= blocks

        await until(holds, f"the server to be followed: {expected}, with {blocks} blocks")

    async with way.open() as url, routed(router, {"a": url}) as client:
        ask = partial(asked, client, cached, "/v1/completions")
        _, expected, found = await ask(**prompts[0])
        assert expected == found == 0
        count = blocks_of(cached)
        way.block()
        assert (await asyncio.to_thread(server.http.post, "/v1/completions", json=prompts[1])).status_code == 200
        way.is_blocked = False
        await is_followed(True, 2 * count)
        for prompt in prompts:
            _, expected, found = await ask(**prompt)
            assert expected == found >= 64

        server.signal()
        assert await asyncio.to_thread(server.wait_for_exit) == 0, "who follows is not waited for"
        await is_followed(False)
        way.url = httpx.URL(urls["b"])
        await is_followed(True)
        _, expected, found = await ask(**prompts[0])
        assert expected == found < 64
        _, expected, found = await ask(**prompts[0])
        assert expected == found >= 64


async def test_what_the_router_cannot_read_is_the_servers_to_refuse(client: httpx.AsyncClient) -> None:
    headers = {"Authorization": "Bearer one"}
    answer = await client.post("/v1/chat/completions", headers=headers, json={"model": "pydoc", "messages": "no list"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
    answer = await client.post("/v1/chat/completions", headers=headers, json={"model": "other", "messages": chat("x")})
    assert answer.status_code == 404
