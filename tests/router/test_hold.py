"""Requests that wait in the router until a server has room."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sized

import httpx
import pytest
from aiohttp import web
from starling_router import hold, upstream
from starling_router.app import MOST_LOST
from starling_router.backend import Backend
from starling_router.hold import HeldRequest
from starling_router.hold_queue import HoldPolicy
from starling_router.router import ServiceRouter

from tests.router.backends import StubBackend, drop, echo, refuse, stream
from tests.router.serving import Start, metric
from tests.waiting import until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HOLD = HoldPolicy()
WAITING = ": waiting\n\n"
DROPPED = "x-llm-d-request-dropped-reason"


def set_ready(backend: StubBackend, ready: bool) -> None:
    backend.state = backend.state.model_copy(update={"ready": ready})


@pytest.fixture
def asleep(backends: list[StubBackend]) -> list[StubBackend]:
    """The backends, none of which is ready."""
    for backend in backends:
        set_ready(backend, False)
    return backends


@pytest.fixture
def single(backends: list[StubBackend]) -> StubBackend:
    """The only backend that is ready."""
    set_ready(backends[1], False)
    return backends[0]


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backend is asked again when a request ends there, and not because time passes."""
    monkeypatch.setattr(hold, "MOST_RETRY_SECONDS", 3600.0)


async def until_metric(client: httpx.AsyncClient, name: str, value: float) -> None:
    async def has_value() -> bool:
        return await metric(client, name) == value

    await until(has_value, f"{name} to be {value}")


async def until_held(client: httpx.AsyncClient, count: int) -> None:
    await until_metric(client, "router_held_requests", count)


async def until_as_many(requests: Sized, count: int) -> None:
    async def are_as_many() -> bool:
        return len(requests) >= count

    await until(are_as_many, f"{count} requests to have come")


class Limited:
    """A backend with so many places for requests other than GET, which end while `may_end`.

    `numbers` are of those that it took, in order; `refused_at` are times.
    """

    def __init__(self, places: int, seconds: float = 0.0, retry_after: str = "60") -> None:
        self.places, self.seconds, self.retry_after = places, seconds, retry_after
        self.open, self.numbers, self.refused_at = 0, list[int](), list[float]()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await echo(request)
        if self.open >= self.places:
            self.refused_at.append(asyncio.get_running_loop().time())
            error = {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
            return web.json_response({"error": error}, status=429, headers={"Retry-After": self.retry_after})
        self.open += 1
        self.numbers.append((await request.json()).get("number", 0))
        try:
            await asyncio.sleep(self.seconds)
            await self.may_end.wait()
        finally:
            self.open -= 1
        return web.json_response({})


def post_all(client: httpx.AsyncClient, count: int) -> "list[asyncio.Task[httpx.Response]]":
    return [asyncio.create_task(client.post(CHAT, json={"number": i})) for i in range(count)]


async def test_all_that_wait_are_answered_when_a_backend_comes(start: Start, asleep: list[StubBackend]) -> None:
    asleep[1].respond = limited = Limited(places=200)
    limited.may_end.clear()
    client = await start(ready=0, hold=HOLD)
    tasks = post_all(client, 200)
    await until_held(client, 200)
    set_ready(asleep[1], True)
    await until_as_many(limited.numbers, 200)  # none waits for another one's answer
    limited.may_end.set()
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert len(asleep[1].paths) == 200 and not asleep[0].paths
    assert await metric(client, "router_held_requests") == 0
    assert await metric(client, "router_hold_seconds_count") == 200


@pytest.mark.usefixtures("asked_once")
async def test_a_backend_that_comes_is_not_run_over(
    start: Start, asleep: list[StubBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "TAKEN_SECONDS", 60.0)  # where the machine stands still, refusals are late, too
    asleep[0].respond = limited = Limited(places=20, seconds=0.1)
    client = await start(ready=0, hold=HOLD)
    tasks = post_all(client, 100)
    await until_held(client, 100)
    set_ready(asleep[0], True)
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
    assert len(limited.refused_at) <= 40


@pytest.mark.usefixtures("asked_once")
async def test_each_request_that_ends_lets_one_try(start: Start, single: StubBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "TAKEN_SECONDS", 60.0)  # as above
    single.respond = limited = Limited(places=4, seconds=0.05)
    client = await start(ready=1, hold=HOLD)
    answers = await asyncio.gather(*post_all(client, 40))
    assert {answer.status_code for answer in answers} == {200}
    assert len(limited.refused_at) <= 36 + 4, "those of the burst, and hardly one later"


@pytest.mark.usefixtures("asked_once")
async def test_requests_go_on_in_order(start: Start, single: StubBackend) -> None:
    single.respond = limited = Limited(places=1)
    limited.may_end.clear()
    client = await start(ready=1, hold=HOLD)
    tasks = [asyncio.create_task(client.post(CHAT, json={"number": 0}))]
    await until_as_many(limited.numbers, 1)
    for i in range(1, 12):
        tasks += [asyncio.create_task(client.post(CHAT, json={"number": i}))]
        await until_held(client, i)
    limited.may_end.set()
    await asyncio.gather(*tasks)
    assert limited.numbers == [*range(12)]


@pytest.mark.parametrize(("retry_after", "least", "most"), [("3600", 1.0, 60.0), ("0.1", 0.1, 1.0)])
async def test_retry_after_holds_back_and_a_second_is_the_most(
    start: Start, single: StubBackend, retry_after: str, least: float, most: float
) -> None:
    single.respond = limited = Limited(places=0, retry_after=retry_after)
    client = await start(ready=1, hold=HOLD)
    task = asyncio.create_task(client.post(CHAT, json={}))
    await until_as_many(limited.refused_at, 1)
    assert (await client.get("/v1/models")).status_code == 200, "its end makes no room"
    await until_as_many(limited.refused_at, 2 if least == 1.0 else 6)
    limited.places = 1
    assert (await task).status_code == 200
    shortest = min(after - before for before, after in itertools.pairwise(limited.refused_at))
    assert least - 0.01 < shortest < most, "where the machine stands still, others are longer"


async def test_a_backend_that_ends_is_waited_for(start: Start, single: StubBackend) -> None:
    single.respond = refuse(503)
    client = await start(ready=1, hold=HOLD)
    task = asyncio.create_task(client.post(CHAT, json={}))
    await until_held(client, 1)
    single.respond = echo
    assert (await task).status_code == 200


async def test_other_refusals_are_the_answer(start: Start, single: StubBackend) -> None:
    single.respond = refuse(429)  # of a caller's rate: its code is not queue_full
    client = await start(ready=1, hold=HOLD)
    assert (await client.post(CHAT, json={})).json()["error"]["message"] == "refused with 429"


@pytest.mark.usefixtures("asked_once")
async def test_the_end_of_the_time_says_what_was_seen(start: Start, asleep: list[StubBackend]) -> None:
    client = await start(ready=0, hold=HoldPolicy(seconds=0.3))
    answer = await client.post(CHAT, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["retry-after"]) == (503, "no_backend", "5")
    assert error["message"] == "no server took this request in 0.3 s: of 2 servers 2 are not ready; try again soon"
    assert answer.headers[DROPPED] == "rejected-ttl-expired"
    set_ready(asleep[0], True)
    asleep[0].respond = Limited(places=0)
    await until_metric(client, "router_ready", 1)
    error = (await client.post(CHAT, json={})).json()["error"]
    assert "of 2 servers 1 is not ready, 1 is full" in error["message"]
    assert await metric(client, "router_hold_refused_total") == 2


@pytest.mark.usefixtures("asked_once")
@pytest.mark.parametrize(("policy", "flag"), [(HoldPolicy(requests=1), "--hold-requests"), (HoldPolicy(bytes=25), "--hold-bytes")])
async def test_more_than_the_bounds_is_refused_at_once(
    start: Start, asleep: list[StubBackend], policy: HoldPolicy, flag: str
) -> None:
    client = await start(ready=0, hold=policy)
    body = {"text": "xxxxxxxxx"}  # 20 bytes
    held = asyncio.create_task(client.post(CHAT, json=body))
    await until_held(client, 1)
    answer = await client.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "no_backend", "5")
    assert flag in answer.json()["error"]["message"] and answer.headers[DROPPED] == "rejected-saturated"
    asleep[0].respond = limited = Limited(places=0)
    set_ready(asleep[0], True)
    await until_as_many(limited.refused_at, 1)
    await until_held(client, 1)
    answer = await client.post(CHAT, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    set_ready(asleep[0], False)
    await until_metric(client, "router_ready", 0)
    limited.places = 1
    set_ready(asleep[0], True)
    assert (await held).status_code == 200


async def test_streams_begin_while_they_wait(start: Start, asleep: list[StubBackend]) -> None:
    client = await start(ready=0, hold=HoldPolicy(first_comment_seconds=0.2, comment_seconds=0.1))
    asleep[0].respond = stream(3)
    async with client.stream("POST", CHAT, json={"stream": True}) as answer:
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        pieces, text = answer.aiter_text(), ""
        while text.count(WAITING) < 2:
            text += await anext(pieces)
        set_ready(asleep[0], True)
        text += "".join([piece async for piece in pieces])
    assert text.startswith(WAITING)
    assert text.replace(WAITING, "") == "data: 0\n\ndata: 1\n\ndata: 2\n\n"


async def streamed_after_a_comment(client: httpx.AsyncClient, path: str, backend: StubBackend) -> str:
    """Returns what a stream has behind its comment. The backend is ready from then on."""
    async with client.stream("POST", path, json={"stream": True}) as answer:
        pieces = answer.aiter_text()
        assert (answer.status_code, await anext(pieces)) == (200, WAITING)
        set_ready(backend, True)
        return "".join([piece async for piece in pieces])


def openai_error(text: str) -> dict[str, object]:
    assert text.startswith("data: ")
    return dict(json.loads(text.removeprefix("data: "))["error"])


def anthropic_error(text: str) -> dict[str, object]:
    assert text.startswith("event: error\ndata: ")
    body = json.loads(text.removeprefix("event: error\ndata: "))
    assert body["type"] == "error"
    return dict(body["error"])


ERRORS = [(CHAT, openai_error), (MESSAGES, anthropic_error)]


@pytest.mark.parametrize(("path", "error_of"), ERRORS)
async def test_a_stream_that_no_backend_took_ends_with_the_error(
    start: Start, asleep: list[StubBackend], path: str, error_of: Callable[[str], dict[str, object]]
) -> None:
    assert asleep
    client = await start(ready=0, hold=HoldPolicy(seconds=0.5, first_comment_seconds=0, comment_seconds=1))
    answer = await client.post(path, json={"stream": True})
    assert answer.status_code == 200 and answer.text.startswith(WAITING)
    assert error_of(answer.text.removeprefix(WAITING))["code"] == "no_backend"


@pytest.mark.parametrize(("path", "error_of"), ERRORS)
async def test_a_refusal_after_the_wait_is_an_event(
    start: Start, asleep: list[StubBackend], path: str, error_of: Callable[[str], dict[str, object]]
) -> None:
    async def respond(_: web.Request) -> web.StreamResponse:
        error = {"type": "invalid_request_error", "message": "messages: wrong", "param": "messages", "code": "invalid_value"}
        text = json.dumps({"type": "error", "error": error}, indent=1)  # an event has it in one line all the same
        return web.Response(text=text, status=400, content_type="application/json")

    client = await start(ready=0, hold=HoldPolicy(first_comment_seconds=0.1, comment_seconds=60))
    asleep[0].respond = respond
    assert error_of(await streamed_after_a_comment(client, path, asleep[0]))["code"] == "invalid_value"


@pytest.mark.parametrize(
    ("respond", "text"),
    [(echo, 'data: {"path":"/v1/chat'), (lambda _: plain("no JSON", 500), 'data: {"error":{"message":"a server answered')],
)
async def test_what_is_no_stream_after_the_wait_is_an_event(
    start: Start, asleep: list[StubBackend], respond: Callable[[web.Request], Awaitable[web.StreamResponse]], text: str
) -> None:
    client = await start(ready=0, hold=HoldPolicy(first_comment_seconds=0.1, comment_seconds=60))
    asleep[0].respond = respond
    assert (await streamed_after_a_comment(client, CHAT, asleep[0])).startswith(text)


async def plain(text: str, status: int) -> web.StreamResponse:
    return web.Response(text=text, status=status)


async def test_what_is_no_stream_after_the_wait_is_kept_within_a_bound(
    start: Start, asleep: list[StubBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "MOST_UNFINISHED", 1 << 20)
    client = await start(ready=0, hold=HoldPolicy(first_comment_seconds=0.1, comment_seconds=60))
    asleep[0].respond = lambda _: plain("x" * (2 << 20), 200)
    text = await streamed_after_a_comment(client, CHAT, asleep[0])
    assert "has not ended after 1 MiB" in str(openai_error(text)["message"])
    assert await metric(client, "router_broken_answers_total") == 1


async def test_a_client_that_goes_is_forgotten(start: Start, asleep: list[StubBackend]) -> None:
    client = await start(ready=0, hold=HoldPolicy(requests=2))
    gone, stays = post_all(client, 2)
    await until_held(client, 2)
    gone.cancel()
    await until_held(client, 1)
    set_ready(asleep[0], True)
    assert (await stays).status_code == 200
    assert len(asleep[0].paths) == 1


async def test_a_request_about_a_stored_response_waits_for_its_pod(start: Start, backends: list[StubBackend]) -> None:
    pinned = {"previous_response_id": "resp_chat-1-0_" + "0" * 32}
    backends[0].respond, backends[1].respond = (full := Limited(places=0)), Limited(places=100)
    client = await start(hold=HOLD)
    tasks = [asyncio.create_task(client.post("/v1/responses", json=pinned)) for _ in range(2)]
    await until_held(client, 2)
    assert {answer.status_code for answer in await asyncio.gather(*post_all(client, 5))} == {200}
    assert len(backends[1].paths) == 5
    await until_held(client, 2)
    full.places = 10
    assert {(await task).status_code for task in tasks} == {200}
    assert len(backends[1].paths) == 5


async def test_a_router_that_ends_lets_nobody_wait(start: Start, asleep: list[StubBackend], routers: list[ServiceRouter]) -> None:
    assert asleep
    client = await start(ready=0, hold=HOLD)
    task = asyncio.create_task(client.post(CHAT, json={}))
    await until_held(client, 1)
    routers[0].end_holding()
    answer = await task
    assert (answer.status_code, answer.json()["error"]["code"], answer.headers["retry-after"]) == (503, "shutting_down", "5")
    assert answer.headers[DROPPED] == "rejected-shutting-down"
    assert (await client.post(CHAT, json={})).json()["error"]["code"] == "no_backend"


async def test_only_requests_with_a_body_wait(start: Start, asleep: list[StubBackend]) -> None:
    assert asleep
    client = await start(ready=0, hold=HoldPolicy(seconds=0.1))
    for asked in ("GET /v1/models", "GET /ready", "DELETE /v1/responses/r", "POST /v1/responses/r/cancel"):
        answer = await client.request(*asked.split())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
    assert await metric(client, "router_hold_seconds_count") == 0


async def test_a_request_that_ends_backends_is_not_sent_for_ever(start: Start, asleep: list[StubBackend]) -> None:
    asleep[0].respond = drop
    client = await start(ready=0, hold=HOLD)
    task = asyncio.create_task(client.post(CHAT, json={}))
    await until_held(client, 1)
    set_ready(asleep[0], True)
    assert (await task).json()["error"]["code"] == "backend_lost"
    assert MOST_LOST <= len(asleep[0].paths) <= 2 * MOST_LOST, "once more by a new connection where it was a kept one"


async def test_a_backend_that_went_is_not_asked_again(
    start: Start, single: StubBackend, routers: list[ServiceRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold, "MOST_RETRY_SECONDS", 0.05)
    single.respond = Limited(places=0)
    client = await start(ready=1, hold=HOLD)
    (waits,) = post_all(client, 1)
    await until_held(client, 1)
    routers[0].set_backends({})

    async def is_forgotten() -> bool:
        return not routers[0]._hold._due

    await until(is_forgotten, "no backend to be asked again")
    assert not waits.done()
    waits.cancel()


@pytest.mark.usefixtures("asked_once")
async def test_requests_are_not_looked_at_while_no_backend_has_room(
    start: Start, single: StubBackend, routers: list[ServiceRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    single.respond = limited = Limited(places=1)
    limited.may_end.clear()
    client = await start(ready=1, hold=HOLD)
    tasks = post_all(client, 20)
    await until_held(client, 19)
    looked_at = list[HeldRequest]()

    def looks(request: HeldRequest, _: object) -> Iterator[Backend]:
        looked_at.append(request)
        return iter(())

    monkeypatch.setattr(HeldRequest, "choices", looks)
    held, (backend,) = routers[0]._hold, routers[0].backends.ready
    held.next_turn()
    held.room(backend, 0)
    assert not looked_at
    held.room(backend, 1)
    assert len(looked_at) == 19
    monkeypatch.undo()
    limited.may_end.set()
    assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
