"""Agents behind routers answer scrapers, and of all others routers alone."""

from collections import Counter
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from starling_agent import routers_only
from starling_agent.api_keys import ApiKeys
from starling_agent.contract.router import ROUTER_TOKEN, router_token
from starling_agent.drain import Drain
from starling_agent.file_token import FileToken
from starling_agent.http.middleware_stack import with_middleware
from starling_agent.routers_only import RoutersOnly
from starling_agent.settings import RateLimit, ServerSettings


class Clock:
    """Time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(routers_only.time, "monotonic", lambda: self.now)


@pytest.fixture
def rule(tmp_path: Path) -> RoutersOnly:
    return make_rule(tmp_path, closed=False)


def make_rule(tmp_path: Path, *, closed: bool) -> RoutersOnly:
    (tmp_path / "token").write_text("admin\n")
    return RoutersOnly(FileToken(tmp_path / "token", router_token), connection_seconds=20, closed=closed)


def test_the_routers_token_follows_from_the_admin_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("admin\n")
    token = FileToken(tmp_path / "token", router_token)
    assert token.matches(router_token(b"admin")) and not token.matches(b"admin")
    (tmp_path / "token").write_text("")
    assert token.value == b"" and not token.matches(router_token(b""))


def test_connections_from_before_have_time_to_end(rule: RoutersOnly, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert rule.admits(b"")
    rule.set(False)
    rule.set(True)
    clock.now += 29
    rule.set(True)  # as each poll says again
    assert rule.admits(b"")
    clock.now += 2
    assert not rule.admits(b"") and not rule.admits(b"admin") and rule.admits(router_token(b"admin"))
    rule.set(False)
    assert rule.admits(b"")


def test_an_agent_that_was_never_reached_otherwise_is_closed_at_once(rule: RoutersOnly) -> None:
    rule.set(True)
    assert not rule.admits(b"")


def test_an_agent_of_a_service_with_tenants_stays_closed(tmp_path: Path) -> None:
    rule = make_rule(tmp_path, closed=True)
    for told in (True, False):
        assert not rule.admits(b"") and rule.admits(router_token(b"admin"))
        rule.set(told)
    assert not rule.admits(b""), "it knows no keys by which it could tell clients apart"


def served(settings: ServerSettings) -> httpx.AsyncClient:
    """A client of an application that answers everything that gets through to it."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    whole = with_middleware(app, settings, Drain(), Counter())
    return httpx.AsyncClient(transport=httpx.ASGITransport(whole), base_url="http://agent")


async def test_rates_are_of_a_routers_clients_and_its_own_questions_have_none(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("shared")
    settings = ServerSettings(access_log=False, router_token=FileToken(tmp_path / "token"), rate_limit=RateLimit(1, 1000.0))
    async with served(settings) as client:

        async def ask(path: str, told: str, token: str = "shared") -> int:
            return (await client.get(path, headers={ROUTER_TOKEN: token, "X-Forwarded-For": told})).status_code

        assert [await ask("/backend", "10.0.0.1") for _ in range(3)] == [200] * 3
        assert [await ask("/v1/models", told) for told in ("10.0.0.1", "10.0.0.2", "10.0.0.9, 10.0.0.1")] == [200, 200, 429]
        assert [await ask("/v1/models", told, "other") for told in ("10.0.0.3", "10.0.0.4")] == [200, 429], "an address of its own"


async def test_scrapers_and_probes_need_no_token(rule: RoutersOnly) -> None:
    rule.set(True)
    async with served(ServerSettings(access_log=False, routers_only=rule)) as client:
        assert [(await client.get(path)).status_code for path in ("/metrics", "/health", "/ready")] == [200] * 3
        refused = await client.post("/v1/completions", json={"model": "m"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "routers_only")
        shown = {ROUTER_TOKEN: router_token(b"admin").decode()}
        assert (await client.post("/v1/completions", json={"model": "m"}, headers=shown)).status_code == 200


@pytest.mark.parametrize(
    ("closed", "with_token", "key", "status"),
    [
        (False, False, "mine", 200),
        (False, False, None, 401),
        (False, False, "other", 401),
        (True, False, "mine", 403),
        (True, True, "mine", 200),
        (True, True, None, 401),
    ],
)
async def test_who_comes_in_behind_a_gateway(
    rule: RoutersOnly, tmp_path: Path, closed: bool, with_token: bool, key: str | None, status: int
) -> None:
    """A picker adds the routers' token. One that fails open adds none: agents are open then, and keys are all that there is."""
    rule.set(closed)
    token = FileToken(tmp_path / "token", router_token)
    settings = ServerSettings(access_log=False, api_keys=ApiKeys(["mine"]), router_token=token, routers_only=rule)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with served(settings) as client:
        answer = await client.get("/v1/models", headers=headers | ({ROUTER_TOKEN: token.value.decode()} if with_token else {}))
    assert answer.status_code == status
