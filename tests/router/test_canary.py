"""A canary gets its part of the requests, and its counts tell what came of them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from aiohttp import web
from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.contract.router_report import CanaryNotice
from starling_agent.file_token import FileToken
from starling_agent.http.error_forms import error_event
from starling_agent.http.errors import ApiError
from starling_agent.openai.stream_record import LAST_NOTE, RESUMABLE, RESUME_TYPE
from starling_agent.settings import ServerSettings
from starling_router import upstream
from starling_router.backend import Backend
from starling_router.canary_file import read_canary
from starling_router.hold_queue import NEVER_HOLD, HoldPolicy
from starling_router.picker import RouterPolicy
from starling_router.revision_order import NextPlaces, RevisionOrder, order_at, sticky_place
from starling_router.router import ServiceRouter
from starling_router.stream_errors import StreamErrors

from tests.router.backends import Respond, StubBackend, drop, refuse, stream
from tests.router.serving import metric, serving
from tests.router.test_hold import until_held
from tests.waiting import until

CHAT, PATH = "/v1/chat/completions", "/router/report"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
STREAM = BODY | {"stream": True}
OLD, NEW = "old", "new"
NOTICE = CanaryNotice(stable=OLD, canary=NEW, weight=10)


def note(**fields: Any) -> dict[str, Any]:
    return {"canary": NOTICE.model_dump() | fields}


# ---- places ----


@pytest.mark.parametrize("weight", [0, 1, 10, 50, 99, 100])
def test_of_2000_requests_the_canary_gets_its_weight(weight: int) -> None:
    notice = NOTICE.model_copy(update={"weight": weight})
    places = NextPlaces(Random(3).shuffle)
    of_nobody = sum(order_at(notice, places.take()).revisions[0] == NEW for _ in range(2000))
    assert of_nobody == 20 * weight
    of_clients = sum(order_at(notice, sticky_place(NEW, b"key-%d" % i)).revisions[0] == NEW for i in range(2000))
    assert abs(of_clients / 2000 - weight / 100) <= 0.02


def test_places_of_nobody_follow_no_pattern() -> None:
    places = NextPlaces(Random(3).shuffle)
    first = [places.take() < 10 for _ in range(100)]
    assert first != [places.take() < 10 for _ in range(100)]


def test_a_client_has_one_place_for_one_canary() -> None:
    clients = [b"key-%d" % i for i in range(200)]
    assert [sticky_place(NEW, each) for each in clients] == [sticky_place(NEW, each) for each in clients]
    assert [sticky_place(NEW, each) for each in clients] != [sticky_place("newer", each) for each in clients]


def backend(name: str, revision: str) -> Backend:
    return Backend(name, "http://" + name, 0, revision=revision, ready=True)


def test_only_the_canarys_requests_may_go_to_the_canary_and_a_third_revision_serves_as_the_stable_one() -> None:
    old, new, older, unnamed = backend("a", OLD), backend("b", NEW), backend("c", "older"), backend("d", "")
    tried, others = order_at(NOTICE, 9), order_at(NOTICE, 10)
    ready = [old, new, older, unnamed]

    def usable(order: RevisionOrder, ready: Sequence[Backend]) -> str:
        return "".join(each.name for each in filter(order.usable(lambda: ready), ready))

    assert usable(tried, ready) == "abcd" and usable(others, ready) == "acd"
    assert usable(others, [new, unnamed]) == "d" and usable(others, [new]) == "b"
    assert [tried.rank(each) for each in ready] == [1, 0, 2, 2] and [others.rank(each) for each in ready] == [0, 2, 1, 1]


def test_a_look_at_all_backends_asks_once_which_ones_are_ready() -> None:
    tried, looks = [backend(str(i), NEW) for i in range(9)], []

    def ready() -> list[Backend]:
        looks.append(1)
        return tried

    assert len([*filter(order_at(NOTICE, 10).usable(ready), tried)]) == 9 and len(looks) == 1


# ---- requests ----


class Fleet:
    """A router before two servers of the old revision and one of the new, and its client."""

    def __init__(self, servers: Sequence[StubBackend], client: httpx.AsyncClient) -> None:
        self.servers, self.client = servers, client
        *self.old, self.new = servers

    async def tell(self, **fields: Any) -> dict[str, Any]:
        """Polls as the operator does."""
        answer = await self.client.post(PATH, json=note(**fields), headers={ROUTER_TOKEN: "of the routers"})
        assert answer.status_code == 200, answer.text
        report: dict[str, Any] = answer.json()
        return report

    async def served(self, count: int, headers: dict[str, str] | None = None, **fields: Any) -> Counter[str]:
        """Returns how many of some requests each revision answered. All of them are answered."""
        answers = [await self.client.post(CHAT, json=BODY | fields, headers=headers) for _ in range(count)]
        assert {each.status_code for each in answers} == {200}
        return Counter(each.headers["revision"] for each in answers)

    async def set_ready(self, servers: Sequence[StubBackend], ready: bool) -> None:
        for each in servers:
            each.state = each.state.model_copy(update={"ready": ready})
        count = sum(each.state.ready for each in self.servers)

        async def seen() -> bool:
            return await metric(self.client, "router_ready") == count

        await until(seen, f"{count} servers to be ready")


def says(server: StubBackend) -> Respond:
    async def respond(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": []}, headers={"revision": server.state.revision})

    return respond


@pytest.fixture
async def running() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def begin(
    running: AsyncExitStack, token: FileToken, hold: HoldPolicy = NEVER_HOLD, canary: CanaryNotice | None = None
) -> Fleet:
    servers = [StubBackend(f"chat-{i}-0") for i in range(3)]
    for server in servers:
        revision = NEW if server is servers[-1] else OLD
        server.state = server.state.model_copy(update={"revision": revision})
        server.respond = says(server)
        await server.start()
        running.push_async_callback(server.close)
    router = ServiceRouter(ServerSettings(access_log=False, router_token=token), RouterPolicy(), hold=hold, canary=canary)
    urls = {each.name: each.url for each in servers}
    return Fleet(servers, await running.enter_async_context(serving(router, urls, 3)))


@pytest.fixture
async def fleet(running: AsyncExitStack, token: FileToken) -> Fleet:
    return await begin(running, token)


def key(i: int) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{i}"}


def keys(*, tried: bool) -> Iterator[int]:
    """Yields numbers of keys whose requests the canary gets at its weight of 10, or does not get."""
    return (i for i in range(1000) if (sticky_place(NEW, b"key-%d" % i) < NOTICE.weight) == tried)


async def test_requests_are_shared_as_the_operator_says_until_it_says_otherwise(fleet: Fleet) -> None:
    assert (await fleet.served(6))[NEW] == 2  # without a canary all servers are equal
    await fleet.tell(weight=50, sticky_by="none")
    assert 0 < (await fleet.served(40))[NEW] < 40
    await fleet.tell(weight=0)
    assert (await fleet.served(5))[NEW] == 0
    await fleet.tell(weight=80)
    shown = (await fleet.client.get("/ui/state")).json()["backends"]
    assert [(each["revision"], each["weight"]) for each in shown] == [(OLD, 20), (OLD, 20), (NEW, 80)]
    await fleet.tell(weight=100)
    assert (await fleet.served(5))[NEW] == 5
    answer = await fleet.client.post(PATH, json={}, headers={ROUTER_TOKEN: "of the routers"})
    assert answer.json()["canary"] is None
    assert 0 < (await fleet.served(9))[NEW] < 9


async def test_a_router_that_starts_knows_the_canary_by_its_file_until_the_operator_tells_it(
    running: AsyncExitStack, token: FileToken, tmp_path: Path
) -> None:
    file = tmp_path / "canary.json"
    assert read_canary(file) is None
    file.write_text('{"stable": 1}')
    assert read_canary(file) is None
    file.write_text(NOTICE.model_copy(update={"weight": 0}).model_dump_json())
    fleet = await begin(running, token, canary=read_canary(file))
    assert await fleet.served(6) == {OLD: 6}
    counted = (await fleet.tell(weight=50))["canary"]
    assert counted["stable"]["requests"] == 6, "the operator's try is the same one"
    await fleet.client.post(PATH, json={}, headers={ROUTER_TOKEN: "of the routers"})
    assert (await fleet.served(6))[NEW] > 0


async def test_clients_stay_by_key_or_session(fleet: Fleet) -> None:
    mine, theirs = next(keys(tried=True)), next(keys(tried=False))
    await fleet.tell(sticky_by="key")
    assert await fleet.served(4, key(mine)) == {NEW: 4} and await fleet.served(4, key(theirs)) == {OLD: 4}
    await fleet.tell(sticky_by="session")
    sessions = [{"X-Session-Id": f"key-{i}"} for i in (mine, theirs)]
    assert await fleet.served(4, sessions[0]) == {NEW: 4} and await fleet.served(4, sessions[1]) == {OLD: 4}
    assert await fleet.served(20, key(mine)) != {NEW: 20}  # it has no session


async def test_the_other_revision_serves_where_one_is_not_ready(fleet: Fleet) -> None:
    await fleet.tell(weight=100)
    await fleet.set_ready([fleet.new], False)
    assert await fleet.served(3) == {OLD: 3}
    await fleet.tell(weight=0)
    await fleet.set_ready([fleet.new], True)
    await fleet.set_ready(fleet.old, False)
    assert await fleet.served(3) == {NEW: 3}


async def test_a_refused_request_stays_in_its_revision_while_that_has_servers(fleet: Fleet) -> None:
    await fleet.tell(weight=0)
    fleet.old[0].respond = refuse(503)
    assert await fleet.served(4) == {OLD: 4}
    fleet.old[1].respond = refuse(503)
    assert await fleet.served(2) == {NEW: 2}
    await fleet.tell(weight=100)
    fleet.new.respond, fleet.old[1].respond = refuse(429), says(fleet.old[1])
    assert await fleet.served(4) == {OLD: 4}


async def test_requests_of_the_stable_revision_wait_for_it_though_the_canary_has_room(
    running: AsyncExitStack, token: FileToken
) -> None:
    fleet = await begin(running, token, HoldPolicy())
    await fleet.tell(weight=0)
    for each in fleet.old:
        each.respond = refuse(503)  # shutting down, and ready until it is asked again
    waits = asyncio.create_task(fleet.served(1))
    await until_held(fleet.client, 1)
    assert not fleet.new.paths
    fleet.old[0].respond = says(fleet.old[0])
    assert await waits == {OLD: 1}
    await fleet.tell(weight=100)
    fleet.new.respond = refuse(503)
    assert await fleet.served(1) == {OLD: 1}


async def test_a_request_that_waits_goes_by_the_weight_of_now(running: AsyncExitStack, token: FileToken) -> None:
    fleet = await begin(running, token, HoldPolicy())
    await fleet.tell(weight=100)
    for each in fleet.servers:
        each.respond = refuse(503)
    waits = asyncio.create_task(fleet.served(1))
    await until_held(fleet.client, 1)
    await fleet.tell(weight=0)
    for each in fleet.servers:
        each.paths.clear()
    fleet.new.respond = says(fleet.new)

    async def are_asked() -> bool:
        return waits.done() or all(each.paths for each in fleet.old)

    await until(are_asked, "the stable revision to be asked again")
    fleet.old[0].respond = says(fleet.old[0])
    assert await waits == {OLD: 1} and not fleet.new.paths


async def test_lists_are_the_stable_revisions(fleet: Fleet) -> None:
    await fleet.tell(weight=100)
    assert {(await fleet.client.get("/v1/models")).headers["revision"] for _ in range(4)} == {OLD}
    assert (await fleet.tell())["canary"]["stable"]["requests"] == 0


# ---- streams ----


def notes(name: str, cut: asyncio.Event) -> Respond:
    """A stream whose events have notes, until it is `cut`. It goes on with a record."""

    async def respond(request: web.Request) -> web.StreamResponse:
        resumed = request.content_type == RESUME_TYPE
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", RESUMABLE: "yes"})
        await response.prepare(request)
        await response.write(f"data: {name}{' goes on' if resumed else ''}\n\n: note {{}}\n\n".encode())
        if not resumed:
            await cut.wait()
            return await drop(request)
        await response.write(LAST_NOTE)
        return response

    return respond


async def test_a_stream_goes_on_in_its_revision_or_where_tokens_are_compared(fleet: Fleet) -> None:
    cut = asyncio.Event()
    cut.set()
    for each in fleet.servers:
        each.respond = notes(each.state.revision, cut)
    await fleet.tell(weight=0, compare="slo")
    assert (await fleet.client.post(CHAT, json=STREAM)).text == "data: old\n\ndata: old goes on\n\n"
    await fleet.set_ready(fleet.servers, True)
    await fleet.tell(weight=100, compare="tokens")
    assert (await fleet.client.post(CHAT, json=STREAM)).text == "data: new\n\ndata: old goes on\n\n"
    await fleet.set_ready(fleet.servers, True)
    await fleet.tell(weight=100, compare="slo")
    broken = (await fleet.client.post(CHAT, json=STREAM)).text
    assert broken.startswith("data: new\n\ndata: {") and "backend_lost" in broken
    report = (await fleet.tell())["canary"]
    assert report["tried"]["requests"] == 2 and report["tried"]["errors"] == 2  # one went on, and its server went away
    assert report["stable"]["requests"] == 1 and report["stable"]["errors"] == 1


async def test_a_stream_that_a_server_hands_over_at_its_end_is_no_error(fleet: Fleet) -> None:
    cut = asyncio.Event()
    for each in fleet.servers:
        each.respond = notes(each.state.revision, cut)
    await fleet.tell(weight=100, compare="tokens")
    asks = asyncio.create_task(fleet.client.post(CHAT, json=STREAM))

    async def is_asked() -> bool:
        return bool(fleet.new.paths)

    await until(is_asked, "the canary to be asked")
    await fleet.set_ready([fleet.new], False)
    cut.set()
    assert (await asks).text == "data: new\n\ndata: old goes on\n\n"
    tried = (await fleet.tell(weight=100, compare="tokens"))["canary"]["tried"]
    assert (tried["requests"], tried["errors"]) == (1, 0)


async def test_a_stream_from_before_a_canary_ends_where_another_model_would_go_on_with_it(fleet: Fleet) -> None:
    cut = asyncio.Event()
    for each in fleet.servers:
        each.respond = notes(each.state.revision, cut)
    await fleet.set_ready([fleet.new], False)
    asks = asyncio.create_task(fleet.client.post(CHAT, json=STREAM))

    async def is_asked() -> bool:
        return any(each.paths for each in fleet.old)

    await until(is_asked, "the stable revision to be asked")
    await fleet.tell(weight=0, compare="slo")
    await fleet.set_ready([fleet.new], True)
    await fleet.set_ready([each for each in fleet.old if not each.paths], False)
    cut.set()
    assert "backend_lost" in (await asks).text and not fleet.new.paths


async def test_what_the_other_revision_began_stays_there(fleet: Fleet) -> None:
    cut = asyncio.Event()
    for each in fleet.servers:
        each.respond = notes(each.state.revision, cut)
    await fleet.tell(weight=100, compare="tokens")
    await fleet.set_ready([fleet.new], False)
    asks = asyncio.create_task(fleet.client.post(CHAT, json=STREAM))

    async def is_asked() -> bool:
        return any(each.paths for each in fleet.old)

    await until(is_asked, "the stable revision to be asked")
    await fleet.set_ready([fleet.new], True)
    cut.set()
    assert (await asks).text == "data: old\n\ndata: old goes on\n\n"


# ---- counts ----

OF_SERVER, OF_REQUEST = ApiError(500, 'at "type"', kind="server_error", code="request_failed"), ApiError(400, "no", code="x")
FAILED_RESPONSE = b'event: response.failed\ndata: {"response":{"error":{"code":"server_error","message":"x"}}}\n\n'


def event(error: ApiError, path: str) -> bytes:
    return error_event(error, {"path": path, "state": {"request_id": "r"}, "headers": []})


@pytest.mark.parametrize(
    ("events", "is_error"),
    [
        (event(OF_SERVER, CHAT), True),
        (event(OF_SERVER, "/v1/messages"), True),
        (FAILED_RESPONSE, True),
        (event(OF_REQUEST, CHAT), False),
        (event(OF_REQUEST, "/v1/messages"), False),
        (b'data: {"text":"\\ndata: {\\"error\\": \\"type\\":\\"server_error\\""}\n\n', False),
    ],
)
def test_an_error_of_a_server_is_found_in_pieces_of_any_size(events: bytes, is_error: bool) -> None:
    told = b'data: {"choices":[]}\n\n' + events + b": note end\n\n"
    for size in (1, 7, len(told)):
        errors = StreamErrors()
        assert sum(errors.take(told[at : at + size]) for at in range(0, len(told), size)) == is_error


async def test_a_stream_that_ends_with_an_error_is_one(fleet: Fleet) -> None:
    async def fail(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n" + event(OF_SERVER, CHAT))
        return response

    await fleet.tell(weight=100)
    fleet.new.respond = fail
    assert "request_failed" in (await fleet.client.post(CHAT, json=STREAM)).text
    tried = (await fleet.tell(weight=100))["canary"]["tried"]
    assert (tried["requests"], tried["errors"]) == (1, 1)


async def test_errors_and_first_tokens_are_counted_by_revision(fleet: Fleet) -> None:
    await fleet.tell(weight=100)
    for respond in (stream(3), refuse(500), stream(1, then=drop), drop):
        fleet.new.respond = respond
        await fleet.client.post(CHAT, json=STREAM)
        await fleet.set_ready(fleet.servers, True)
    third = await fleet.tell(weight=100)
    tried, stable = third["canary"]["tried"], third["canary"]["stable"]
    assert (tried["requests"], tried["errors"]) == (4, 3)
    assert tried["first_tokens_all"] == tried["first_tokens"][-1] == 2 and sorted(tried["first_tokens"]) == tried["first_tokens"]
    assert (stable["requests"], stable["errors"]) == (1, 0)  # the one under which the canary went away
    text = (await fleet.client.get("/metrics")).text
    assert f'starling:router_revision_requests_total{{revision="{NEW}"}} 4.0' in text
    assert f'starling:router_revision_errors_total{{revision="{NEW}"}} 3.0' in text
    assert f'starling:router_revision_first_token_seconds_bucket{{le="+Inf",revision="{NEW}"}} 2.0' in text
    kept = await fleet.tell(weight=50, compare="tokens")
    assert kept["canary"]["tried"] == tried and kept["canary"]["attempt"] == ""
    again = (await fleet.tell(attempt="2"))["canary"]
    assert (again["attempt"], again["tried"]["requests"], again["tried"]["errors"]) == ("2", 0, 0)
    assert (await fleet.tell(canary="newer"))["canary"]["tried"]["requests"] == 0


async def test_an_answer_that_is_cut_for_its_size_is_an_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 1000)

    monkeypatch.setattr(upstream, "MOST_UNFINISHED", 1000)
    await fleet.tell(weight=100)
    fleet.new.respond = endless
    assert "bad_answer" in (await fleet.client.post(CHAT, json=STREAM)).text
    tried = (await fleet.tell(weight=100))["canary"]["tried"]
    assert (tried["requests"], tried["errors"]) == (1, 1)


async def test_a_refusal_of_servers_that_end_is_no_error(fleet: Fleet) -> None:
    await fleet.tell(weight=100)
    for each in fleet.servers:
        each.respond = refuse(503)
    assert (await fleet.client.post(CHAT, json=BODY)).status_code == 503
    report = (await fleet.tell(weight=100))["canary"]
    requests, errors = (report["tried"][name] + report["stable"][name] for name in ("requests", "errors"))
    assert (requests, errors) == (1, 0)


async def test_a_canary_that_takes_nothing_has_been_placed_requests(fleet: Fleet) -> None:
    await fleet.tell(weight=100)
    fleet.new.respond = refuse(429)
    assert await fleet.served(4) == {OLD: 4}
    silent = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await silent.wait()
        return web.json_response({})

    fleet.new.respond = hang
    with pytest.raises(httpx.TimeoutException):
        await fleet.client.post(CHAT, json=BODY, timeout=0.3)
    stored = BODY | {"previous_response_id": "resp_unknown"}
    fleet.new.respond = says(fleet.new)
    await fleet.client.post("/v1/responses", json=stored)  # it goes where the response is
    report = (await fleet.tell(weight=100))["canary"]
    silent.set()
    assert (report["tried"]["placed"], report["tried"]["requests"]) == (5, 1)
    assert (report["stable"]["placed"], report["stable"]["requests"]) == (0, 4)


async def test_counts_are_news_after_a_while_and_first_errors_at_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling_router.demand.QUIET_SECONDS", 1000.0)
    monkeypatch.setattr("starling_router.demand.CANARY_SECONDS", 0.0)
    before = (await fleet.tell(weight=100))["version"]
    await fleet.served(2)

    async def has_grown() -> bool:
        return bool((await fleet.tell(weight=100))["version"] >= before + 2)

    await until(has_grown, "a version for the first request and one for the counts")
    monkeypatch.setattr("starling_router.demand.CANARY_SECONDS", 1000.0)
    before = (await fleet.tell(weight=100))["version"]
    fleet.new.respond = refuse(500)
    for _ in range(5):
        await fleet.client.post(CHAT, json=BODY)
    assert (await fleet.tell(weight=100))["version"] == before + 2  # so many errors are enough for the operator to judge
