"""What backends tell that they have cached is known while they tell it, and not a moment longer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web
from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_engine.kv.changes import CacheChanges, CoreChanges
from starling_router import watch
from starling_router.events import CachedBlocks
from starling_router.index import GuessedIndex
from starling_router.prefixes import Prefixes
from starling_router.prompt import RoutedPrompt
from starling_router.router import ServiceRouter

from tests.router.backends import StubBackend, echo
from tests.router.conftest import TOKEN
from tests.router.serving import Start, metric
from tests.waiting import until


class Telling:
    """Answers /backend/cache of a backend with lines, until it is told to break off."""

    def __init__(self, backend: StubBackend) -> None:
        self.lines = asyncio.Queue[bytes | None]()
        self.tokens: list[str] = []
        backend.respond = self._respond
        backend.state = backend.state.model_copy(update={"shows_cache": True})

    def tell(self, core: int = 0, **fields: object) -> None:
        self.lines.put_nowait(msgspec.json.encode(CoreChanges(CacheChanges(**fields), core)) + b"\n")  # type: ignore[arg-type]

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/backend/cache":
            return await echo(request)
        self.tokens.append(request.headers.get(ROUTER_TOKEN, ""))
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.lines.get()) is not None:
            await response.write(line)
        return response


@pytest.fixture
async def telling(backends: list[StubBackend]) -> AsyncIterator[Telling]:
    made = Telling(backends[0])
    yield made
    made.lines.put_nowait(None)


def known(router: ServiceRouter) -> Callable[..., Awaitable[None]]:
    """Returns what waits until just these blocks are known: by medium, of all cores together."""

    async def wait(device: set[int], host: set[int]) -> None:
        indexes = router._watch._cached.indexes

        async def holds() -> bool:
            return [{block for block in range(200) if index.mask(block)} for index in indexes] == [device, host]

        await until(holds, f"{device} and {host}")

    return wait


async def test_a_backend_is_known_as_it_tells_until_it_ends(
    start: Start, telling: Telling, routers: list[ServiceRouter], token: FileToken
) -> None:
    await start(router_token=token)
    are_known = known(routers[0])
    telling.tell(anew=True)
    telling.tell(stored=[1, 2])
    telling.tell(medium="CPU", stored=[2], removed=[7])
    telling.tell(medium="of a later release", stored=[3])
    telling.tell(core=1, stored=[5])
    await are_known({1, 2, 5}, {2})
    telling.tell(stored=[4], removed=[1])
    await are_known({2, 4, 5}, {2})
    telling.tell(anew=True, stored=[9])
    await are_known({5, 9}, set())
    telling.lines.put_nowait(None)
    await are_known(set(), set())
    telling.tell(anew=True, stored=[6])  # to who asks again
    await are_known({6}, set())
    assert telling.tokens == [TOKEN] * 2


async def test_what_cannot_be_read_is_forgotten_and_said_once(
    start: Start, telling: Telling, routers: list[ServiceRouter], token: FileToken, capsys: pytest.CaptureFixture[str]
) -> None:
    await start(router_token=token)
    telling.tell(stored=[1])
    await known(routers[0])({1}, set())
    telling.lines.put_nowait(b"no line of ours\n")
    await known(routers[0])(set(), set())
    telling.lines.put_nowait(b"none either\n")
    telling.tell(stored=[2])
    await known(routers[0])({2}, set())
    assert capsys.readouterr().out.count("what it has cached cannot be read") == 1


async def test_nobody_is_asked_without_a_token(
    start: Start, telling: Telling, backends: list[StubBackend], routers: list[ServiceRouter]
) -> None:
    client = await start()
    await asked_again(routers[0], backends[0])
    assert (await client.post("/v1/completions", json={"model": "m", "prompt": "x"})).status_code == 200
    assert telling.tokens == [] and await metric(client, "router_exact_prompts_total") == 0


async def test_one_late_answer_is_no_reason_to_leave_a_backend_alone(
    start: Start,
    backends: list[StubBackend],
    routers: list[ServiceRouter],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = await start()
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.3)
    backends[0].late = 1
    await asked_again(routers[0], backends[0])
    assert backends[0].late == 0 and "backend not ready" not in capsys.readouterr().out
    backends[0].late = 2

    async def is_left_alone() -> bool:
        return await metric(client, "router_ready") == 1

    await until(is_left_alone, "two late answers to be noticed")


async def asked_again(router: ServiceRouter, backend: StubBackend) -> None:
    """Waits until the router has read an answer to a question that it has not asked yet."""
    before = backend.state
    backend.state = before.model_copy(update={"step_tokens": before.step_tokens + 1})

    async def is_read() -> bool:
        return router._watch.states[backend.name] == backend.state

    await until(is_read, "another answer")


def test_what_a_prefix_is_found_by_is_as_a_core_says_when_it_tells_all() -> None:
    """One with a state has a prefix up to a snapshot, in whatever medium; with a state alone that is all it needs."""
    cached = CachedBlocks()
    plain, hybrid, alone = (cached.add_core(backend) for backend in (5, 6, 7))
    prefixes, prompt = Prefixes(cached, GuessedIndex(10)), RoutedPrompt(70, [1, 2, 3, 4], 16, exact=True)
    assert not prefixes.begun_tokens(prompt)
    cached.apply(plain, CacheChanges(anew=True))
    cached.apply(hybrid, CacheChanges(anew=True, found_by="blocks and snapshots"))
    cached.apply(alone, CacheChanges(anew=True, found_by="snapshots"))
    for core in (plain, hybrid):
        cached.apply(core, CacheChanges(stored=[1, 2, 3]))
    assert prefixes.cached_tokens(prompt) == {5: 48}
    for core in (hybrid, alone):
        cached.apply(core, CacheChanges("GPU snapshots", stored=[2]))
        cached.apply(core, CacheChanges("CPU snapshots", stored=[1, 4]))
    assert prefixes.cached_tokens(prompt) == {5: 48, 6: 32, 7: 64}
    cached.apply(hybrid, CacheChanges("GPU snapshots", removed=[2]))
    assert prefixes.cached_tokens(prompt) == {5: 48, 6: 16, 7: 64}
    prefixes.sent(5, prompt)
    assert prefixes.begun_tokens(prompt) == {5: 64}
    cached.apply(hybrid, CacheChanges(anew=True, found_by="blocks and snapshots"))
    assert prefixes.cached_tokens(prompt) == {5: 48, 7: 64}
    for core in (hybrid, alone):
        cached.remove_core(core)
    assert cached.add_core(8) == hybrid and not prefixes.begun_tokens(prompt)
    cached.apply(hybrid, CacheChanges(stored=[1]))
    assert prefixes.cached_tokens(prompt) == {5: 48, 8: 16}, "its number was one's with a state"


def test_cores_of_a_backend_have_their_own_blocks() -> None:
    cached = CachedBlocks()
    first, second, other = cached.add_core(7), cached.add_core(7), cached.add_core(8)
    prefixes = Prefixes(cached, GuessedIndex(10))
    prompt = RoutedPrompt(64, [1, 2, 3, 4], 16, exact=True)
    cached.apply(first, CacheChanges(stored=[1, 2, 3]))
    cached.apply(second, CacheChanges(stored=[1]))
    cached.apply(other, CacheChanges(stored=[1, 2]))
    assert prefixes.cached_tokens(prompt) == {7: 48, 8: 32}
    cached.apply(second, CacheChanges(anew=True))
    assert prefixes.cached_tokens(prompt) == {7: 48, 8: 32}
    cached.remove_core(first)
    assert prefixes.cached_tokens(prompt) == {8: 32}
    assert cached.add_core(9) == first
