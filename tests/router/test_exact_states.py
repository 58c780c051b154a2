"""Models with a recurrent state: a request goes where a snapshot is, and finds there what the router expects of it."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from starling_agent.file_token import FileToken
from starling_agent.settings import ServerSettings
from starling_router.events import CachedBlocks
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter

from tests.agent.conftest import StartServer
from tests.agent.conftest import start_server as start_server
from tests.engine.checkpoints import FAMILIES, write_servable
from tests.router.serving import serving
from tests.router.test_exact import FLAGS, TEXT, answered, chat, routed
from tests.router.test_exact import token as token
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = TEXT * 4
"""A text for whose prompt a snapshot is worth a step."""


@pytest.fixture(scope="module", params=["lfm2", pytest.param("falcon-mamba", marks=pytest.mark.whole)])
def urls(
    request: pytest.FixtureRequest, start_server: StartServer, token: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Two servers of a small model, a hybrid or one of a state alone, that reads text as the repository's own."""
    folder = tmp_path_factory.mktemp(request.param)
    write_servable(folder, FAMILIES[request.param])
    flags = (*FLAGS, "--max-model-len=2048", f"--router-token-file={token}")
    return {name: start_server(*flags, model=str(folder)).url for name in ("a", "b")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(urls: dict[str, str], token: Path) -> AsyncIterator[tuple[httpx.AsyncClient, CachedBlocks]]:
    """Yields a client of a router before the servers, and what that knows of their caches."""
    router = ServiceRouter(ServerSettings(access_log=False, router_token=FileToken(token)), RouterPolicy(), lambda: None)
    async with routed(router, urls) as client:
        yield client, router._watch._cached


def snapshots_of(cached: CachedBlocks) -> int:
    return sum(index.count(core) for index in cached.snapshots.indexes for core in cached.backends)


async def snapshots_known(cached: CachedBlocks, count: int) -> None:
    async def are_known() -> bool:
        return snapshots_of(cached) >= count

    await until(are_known, f"{count} snapshots to be told of")


async def test_the_next_turn_goes_where_the_snapshot_is(service: tuple[httpx.AsyncClient, CachedBlocks]) -> None:
    """The other server is as idle, and would be next in turn."""
    client, cached = service
    ask = partial(answered, client, "/v1/chat/completions", max_tokens=4)
    talks = [await ask(messages=chat(f"{i} {LONG}")) for i in range(4)]
    assert {talk[0] for talk in talks} == {"a", "b"} and all(talk[1:3] == (0, 0) for talk in talks)
    await snapshots_known(cached, 4)
    for i in (2, 0, 3, 1):
        backend, expected, found, _ = await ask(messages=chat(f"{i} {LONG}", "Yes.", "And?"))
        assert backend == talks[i][0] and expected == found >= 256


async def test_a_beginning_without_a_snapshot_is_no_hit(service: tuple[httpx.AsyncClient, CachedBlocks]) -> None:
    """The second prompt that has it leaves one where it ends, which the third one finds, and the router expects it then."""
    client, cached = service
    ask = partial(answered, client, "/v1/completions", max_tokens=1)
    known = snapshots_of(cached)
    first = await ask(prompt=f"A common beginning. {LONG} One.{LONG}")
    await snapshots_known(cached, known + 1)
    second = await ask(prompt=f"A common beginning. {LONG} Two.{LONG}")
    assert second[:3] == (first[0], 0, 0), "the other one is as idle, but would leave a snapshot for nobody"
    await snapshots_known(cached, known + 3)
    backend, expected, found, _ = await ask(prompt=f"A common beginning. {LONG} Three.{LONG}")
    assert backend == first[0] and expected == found >= 256


async def test_without_a_token_texts_tell_where_a_snapshot_may_be(urls: dict[str, str]) -> None:
    """What is expected is a guess then, by the bytes that a server was sent."""
    router = ServiceRouter(ServerSettings(access_log=False), RouterPolicy(), lambda: None)
    async with serving(router, urls, 2) as client:
        ask = partial(answered, client, "/v1/chat/completions", max_tokens=4)
        talks = [await ask(messages=chat(f"Text {i}. {LONG}")) for i in range(4)]
        assert {talk[0] for talk in talks} == {"a", "b"}
        for i in (2, 0, 3, 1):
            backend, expected, found, _ = await ask(messages=chat(f"Text {i}. {LONG}", "Yes.", "And?"))
            assert backend == talks[i][0] and expected > 256 and found >= 256
