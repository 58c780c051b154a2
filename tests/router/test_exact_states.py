"""Models with a recurrent state: a request goes where a snapshot is, and finds there what the router expects of it."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
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

from tests.agent.conftest import MODEL, REPOSITORY, StartServer
from tests.agent.conftest import start_server as start_server
from tests.engine.checkpoints import FAMILIES, write_checkpoint
from tests.router.test_exact import FLAGS, TEXT, answered, chat, routed
from tests.router.test_exact import token as token
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = TEXT * 4
"""A text for whose prompt a snapshot is worth a step."""


@pytest.fixture(scope="module", params=["lfm2", "falcon-mamba"])
def urls(
    request: pytest.FixtureRequest, start_server: StartServer, token: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Two servers of a small model with random weights, beside keys and values or alone, that reads text as the repository's own."""
    folder, family = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    write_checkpoint(folder, replace(family, changes={**family.changes, "vocab_size": 4096}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / MODEL / name, folder)
    flags = (*FLAGS, "--max-model-len=2048", f"--router-token-file={token}")
    return {name: start_server(*flags, model=str(folder)).url for name in ("a", "b")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(urls: dict[str, str], token: Path) -> AsyncIterator[tuple[httpx.AsyncClient, CachedBlocks]]:
    """Yields a client of a router before the servers, and what that knows of their caches."""
    router = ServiceRouter(ServerSettings(access_log=False, router_token=FileToken(token)), RouterPolicy(), lambda: None)
    async with routed(router, urls) as client:
        yield client, router._watch._cached


async def snapshots_known(cached: CachedBlocks, count: int) -> None:
    async def are_known() -> bool:
        return sum(index.count(core) for index in cached.snapshots.indexes for core in cached.backends) >= count

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
        print("SEEN", i, backend, expected, found)


async def test_a_beginning_without_a_snapshot_is_no_hit(service: tuple[httpx.AsyncClient, CachedBlocks]) -> None:
    """The second prompt that has it leaves one where it ends, which the third one finds, and the router expects it then."""
    client, cached = service
    ask = partial(answered, client, "/v1/completions", max_tokens=1)
    known = sum(index.count(core) for index in cached.snapshots.indexes for core in cached.backends)
    first = await ask(prompt=f"A common beginning. {LONG} One.{LONG}")
    await snapshots_known(cached, known + 1)
    _, expected, found, _ = await ask(prompt=f"A common beginning. {LONG} Two.{LONG}")
    assert expected == found == 0
    print("SEEN", first, expected, found)
