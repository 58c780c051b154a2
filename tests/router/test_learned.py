"""Tokenizers that backends tell: what cannot be used does no harm, and what no backend has any more is forgotten."""

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from starling_agent.file_token import FileToken
from starling_engine.frontend.tokenizer import Tokenizer
from starling_router.router import ServiceRouter

from tests.agent.conftest import MODEL, REPOSITORY
from tests.router.backends import Respond, StubBackend, echo
from tests.router.serving import Start, metric
from tests.waiting import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def told(data: bytes, status: int = 200) -> Respond:
    async def respond(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/backend/prompting":
                return web.Response(body=data, status=status)
            case "/backend/cache":
                return await nothing_cached(request)
        return await echo(request)

    return respond


async def nothing_cached(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"changes":{"anew":true}}\n')
    await asyncio.sleep(60)
    return response


def bundle(**changed: Any) -> bytes:
    tokenizer = Tokenizer.load(REPOSITORY / MODEL)
    fields = {
        "tokenizer": tokenizer.backend.to_str(),
        "named_tokens": dict(tokenizer.renderer.named_tokens),
        "templates": dict(tokenizer.renderer.templates.by_name),
        "info": tokenizer.info,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": 128,
        "max_prompts": 8,
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
    }
    return gzip.compress(json.dumps(fields | changed).encode())


def tell(backend: StubBackend, digest: str, respond: Respond) -> None:
    backend.respond = respond
    backend.state = backend.state.model_copy(update={"prompting": digest, "shows_cache": True})


async def test_a_new_tokenizer_is_fetched_once_and_the_old_one_forgotten(
    start: Start, backends: list[StubBackend], routers: list[ServiceRouter], token: FileToken
) -> None:
    for backend in backends:
        tell(backend, "first", told(bundle()))
    client = await start(router_token=token)

    async def exact() -> bool:
        await client.post("/v1/chat/completions", json=CHAT)
        return await metric(client, "router_exact_prompts_total") > 0

    await until(exact, "the tokenizer")
    assert sum(backend.paths.count("/backend/prompting") for backend in backends) == 1
    learned = routers[0].learned
    for backend in backends:
        tell(backend, "second", backend.respond)

    async def changed() -> bool:
        return learned.get("first") is None and learned.get("second") is not None

    await until(changed, "the second one")


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: b"no gzip", "prompting cannot be read"),
        (lambda: bundle()[:100], "is cut"),
        (lambda: bundle(tokenizer="{}"), "tokenizer cannot be read"),
        (lambda: bundle(vocab_size="many"), "vocab_size"),
        (lambda: bundle(tool_call_parser="of a later release"), "tool_call_parser"),
    ],
    ids=["no gzip", "cut", "tokenizer", "field", "parser"],
)
async def test_what_cannot_be_used_is_said_once_and_prompts_go_by_their_text(
    start: Start,
    backends: list[StubBackend],
    make: Callable[[], bytes],
    cause: str,
    token: FileToken,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell(backends[0], "bad", told(make()))
    client = await start(router_token=token)
    said = ""

    async def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return cause in said

    await until(is_said, "the warning")
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert await metric(client, "router_exact_prompts_total") == 0
    assert backends[0].paths.count("/backend/prompting") == 1


async def test_a_server_that_tells_nothing_now_is_asked_again(start: Start, backends: list[StubBackend], token: FileToken) -> None:
    tell(backends[0], "late", told(b"", 503))
    client = await start(router_token=token)

    async def asked() -> bool:
        return backends[0].paths.count("/backend/prompting") > 1

    await until(asked, "another question")
    backends[0].respond = told(bundle())

    async def exact() -> bool:
        await client.post("/v1/chat/completions", json=CHAT)
        return await metric(client, "router_exact_prompts_total") > 0

    await until(exact, "the tokenizer")


async def test_a_tokenizer_that_goes_and_comes_back_while_it_is_fetched_is_taken_once(
    start: Start, backends: list[StubBackend], routers: list[ServiceRouter], token: FileToken, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, answer = asyncio.Event(), told(bundle())

    async def late(request: web.Request) -> web.StreamResponse:
        if request.path == "/backend/prompting":
            await gate.wait()
        return await answer(request)

    backend = backends[0]
    tell(backend, "first", late)
    await start(router_token=token)

    async def is_asked() -> bool:
        return backend.paths.count("/backend/prompting") == count

    for count, digest in enumerate(("first", "second", "first"), 1):
        tell(backend, digest, late)
        await until(is_asked, f"question {count}")
    gate.set()

    async def is_fetched() -> bool:
        fetches = [task for task in asyncio.all_tasks() if "LearnedPrompts._fetch" in repr(task.get_coro())]
        return not fetches and routers[0].learned.get("first") is not None

    await until(is_fetched, "the tokenizer")
    said = capsys.readouterr().out
    assert said.count("prompts go by their blocks") == 1
