"""Backends that DNS and files have: those that come and go, and answers that fail."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starling_agent.contract.router import POD, ROUTER_TOKEN
from starling_agent.file_token import FileToken
from starling_agent.settings import ServerSettings
from starling_engine.errors import ConfigError
from starling_router import discovery
from starling_router.discovery import BackendsFile, BackendSources, BackendsService
from starling_router.picker import RouterPolicy
from starling_router.router import ServiceRouter

from tests.router.backends import StubBackend
from tests.router.conftest import TOKEN
from tests.router.serving import Start, metric, serving
from tests.waiting import until


async def seen(holds: Callable[[], bool], what: str) -> None:
    async def check() -> bool:
        return holds()

    await until(check, what, 20)


class Zone:
    """Answers look-ups in place of a DNS server, which tests have no right to set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = []
        self.fails = False
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)
        monkeypatch.setattr(discovery, "PERIOD_SECONDS", 0.02)

    def _answer(self, host: str, port: int, *_: object, **__: object) -> list[object]:
        self.asked += 1
        if self.fails or not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        assert host == "chat-backends.prod.svc"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.addresses]

    async def asked_again(self) -> None:
        count = self.asked + 2
        await seen(lambda: self.asked >= count, "another look-up")


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Zone:
    return Zone(monkeypatch)


def named(port: int) -> BackendSources:
    return BackendSources(service=BackendsService("chat-backends.prod.svc", port))


@asynccontextmanager
async def router_of(sources: BackendSources) -> AsyncIterator[ServiceRouter]:
    router = ServiceRouter(ServerSettings(access_log=False), RouterPolicy())
    finding = asyncio.create_task(router.find_backends(sources))
    yield router
    finding.cancel()
    await asyncio.gather(finding, return_exceptions=True)
    await router.close()


def names(router: ServiceRouter) -> set[str]:
    return {backend.name for backend in router.backends.all}


def ready(router: ServiceRouter) -> set[str]:
    return {backend.pod for backend in router.backends.ready}


async def test_backends_are_known_once_they_were_found_and_asked(zone: Zone, backends: list[StubBackend]) -> None:
    port = int(backends[0].url.rpartition(":")[2])
    zone.addresses = ["127.0.0.1"]
    backends[0].state = backends[0].state.model_copy(update={"ready": False})
    async with router_of(named(port)) as router:
        known = asyncio.create_task(router.knows_backends())
        await asyncio.sleep(0)
        assert not known.done() and not router.backends.all
        await asyncio.wait_for(known, 20)
        assert [backend.pod for backend in router.backends.all] == ["chat-1-0"], "it has said that it is not ready"


async def test_a_server_of_another_service_sees_no_token(start: Start, backends: list[StubBackend], token: FileToken) -> None:
    """As where a pod's address was given to another service's pod. One that comes to know the token is asked again."""
    backends[0].token, backends[1].token = b"of another service", token.value
    client = await start(ready=1, router_token=token)
    assert (await client.post("/v1/chat/completions", json={})).status_code == 200
    assert not backends[0].shown and TOKEN in backends[1].shown
    backends[0].token = token.value

    async def both_are_ready() -> bool:
        return await metric(client, "router_ready") == 2

    await until(both_are_ready, "the other server to be known")


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_what_refuses_to_prove_itself_sees_no_token(
    start: Start, backends: list[StubBackend], token: FileToken, status: int
) -> None:
    """As where a pod's address was given to a program that checks keys of its own, or knows no such path."""
    backends[0].refuses_proof, backends[1].token = status, token.value
    client = await start(ready=1, router_token=token)
    assert (await client.post("/v1/chat/completions", json={})).status_code == 200
    assert not backends[0].shown and TOKEN in backends[1].shown


async def test_backends_come_and_go_with_their_addresses(zone: Zone, backends: list[StubBackend]) -> None:
    port = int(backends[0].url.rpartition(":")[2])
    async with router_of(named(port)) as router:
        await zone.asked_again()
        assert names(router) == set()
        zone.addresses = ["127.0.0.1", "127.0.0.2"]
        await seen(lambda: ready(router) == {"chat-1-0"}, "the backend to be ready")
        assert names(router) == {f"127.0.0.1:{port}", f"127.0.0.2:{port}"}
        zone.addresses = ["127.0.0.2"]
        await seen(lambda: names(router) == {f"127.0.0.2:{port}"}, "the other one to go")


async def test_without_an_answer_those_that_are_ready_stay(
    zone: Zone, backends: list[StubBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(backends[0].url.rpartition(":")[2])
    async with router_of(named(port)) as router:
        zone.addresses = ["127.0.0.1", "127.0.0.2"]
        await seen(lambda: ready(router) == {"chat-1-0"}, "the backend to be ready")
        zone.fails = True
        await zone.asked_again()
        assert len(names(router)) == 2
        monkeypatch.setattr(discovery, "KEPT_SECONDS", 0.0)
        await seen(lambda: names(router) == {f"127.0.0.1:{port}"}, "the one that does not answer to go")
        await backends[0].close()
        await seen(lambda: names(router) == set(), "the other one to go, too")


async def test_a_request_of_an_agent_comes_to_its_own_pod(start: Start, backends: list[StubBackend], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    token = FileToken(tmp_path / "token")
    client = await start(router_token=token)
    body = {"model": "m", "prompt": "Hello"}
    for backend in backends:
        for _ in range(3):
            headers = {ROUTER_TOKEN: "t", POD: backend.name}
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert backend.paths == ["/v1/completions"] * 3
    away = await client.post("/v1/completions", json=body, headers={ROUTER_TOKEN: "t", POD: "chat-9-0"})
    assert (away.status_code, away.json()["error"]["code"]) == (503, "no_backend")
    for _ in range(4):  # a client's header is no wish
        await client.post("/v1/completions", json=body, headers={ROUTER_TOKEN: "guessed", POD: "chat-1-0"})
    assert len(backends[1].paths) > 3


async def test_backends_see_the_token_with_each_request(backends: list[StubBackend], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    settings = ServerSettings(access_log=False, router_token=FileToken(tmp_path / "token"))
    router = ServiceRouter(settings, RouterPolicy())
    async with serving(router, {"a": backends[0].url}, 1) as client:
        headers = (await client.get("/v1/models")).json()["headers"]
        assert headers[ROUTER_TOKEN] == "t"
        assert await metric(client, "router_ready") == 1


async def test_backends_come_and_go_with_the_lines_of_a_file(
    backends: list[StubBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "PERIOD_SECONDS", 0.02)
    first, other = (backend.url for backend in backends)
    file = tmp_path / "backends"
    file.write_text(f"# one a line\n{first}/v1\n")
    async with router_of(BackendSources(file=BackendsFile(file))) as router:
        await seen(lambda: ready(router) == {"chat-1-0"}, "the backend to be ready")
        file.write_text(f"{other}\n{first}\n")
        await seen(lambda: ready(router) == {"chat-1-0", "chat-2-0"}, "the other one to be ready, too")
        file.write_text("")
        await seen(lambda: names(router) == set(), "both to go")


def test_a_file_that_cannot_be_used_any_more_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "backends"
    file.write_text("http://a:1\n")
    found = BackendsFile(file)
    file.write_text("http://a:1\nhttp://\n")
    assert found.urls == ("http://a:1",)
    file.unlink()
    assert found.urls == ("http://a:1",)
    file.write_text("http://b:20\n")
    assert found.urls == ("http://b:20",)


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("http://a:1\n\nb:2\n", "backends, line 3: must be http://HOST:PORT of a server")],
)
def test_a_file_that_cannot_be_used_at_the_start(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "backends").write_text(text)
    with pytest.raises(ConfigError, match=says) as refused:
        BackendsFile(tmp_path / "backends")
    assert refused.value.field == "backends_file"


async def test_why_a_backend_was_never_ready_is_said_once_for_each_cause(
    start: Start, backends: list[StubBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    await backends[1].close()
    client = await start(ready=1)
    said = ""

    async def is_said() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "backend not ready" in said

    await until(is_said, "the cause")
    assert "Connection refused" in said and await metric(client, "router_ready") == 1
