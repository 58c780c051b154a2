"""Servers that answer as agents do, and routers before them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from starling_agent.file_token import FileToken
from starling_agent.settings import ServerSettings
from starling_router.hold_queue import NEVER_HOLD, HoldPolicy
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter

from tests.router.backends import StubBackend
from tests.router.serving import Start, serving

TOKEN = "of the routers"


@pytest.fixture
async def backends() -> AsyncIterator[list[StubBackend]]:
    made = [StubBackend("chat-1-0"), StubBackend("chat-2-0")]
    for backend in made:
        await backend.start()
    yield made
    for backend in made:
        await backend.close()


@pytest.fixture
def token(tmp_path: Path) -> FileToken:
    (tmp_path / "token").write_text(TOKEN)
    return FileToken(tmp_path / "token")


@pytest.fixture
def routers() -> list[ServiceRouter]:
    """Those that `start` made."""
    return []


@pytest.fixture
async def start(backends: list[StubBackend], routers: list[ServiceRouter]) -> AsyncIterator[Start]:
    """start(ready=2, **settings): a router before the backends, and its client, when so many of them are ready."""
    async with AsyncExitStack() as running:

        async def make(ready: int = 2, hold: HoldPolicy = NEVER_HOLD, **settings: object) -> httpx.AsyncClient:
            made = ServerSettings(access_log=False, **settings)  # type: ignore[arg-type]
            routers.append(ServiceRouter(made, RouterPolicy(), hold=hold))
            return await running.enter_async_context(serving(routers[-1], {each.name: each.url for each in backends}, ready))

        yield make
