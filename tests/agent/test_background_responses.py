"""Responses in the background, through OpenAI's client: followed, cancelled, deleted, and shared by servers with one folder."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent
from starling_agent.api_keys import cache_salt_of
from starling_agent.http.errors import ApiError
from starling_agent.http.open_requests import OpenRequests
from starling_agent.openai.responses import background
from starling_agent.openai.responses.background import BackgroundResponses
from starling_agent.openai.responses.background_response import BackgroundResponse
from starling_agent.openai.responses.disk_threads import DISK_SECONDS
from starling_agent.openai.responses.folder_store import THREADS, FolderStore
from starling_agent.openai.responses.ids import new_response_id
from starling_agent.openai.responses.memory_store import MemoryStore
from starling_agent.openai.responses.store import StoredResponse, StoreLimits
from starling_agent.openai.responses.writer import ResponseWriter
from starling_engine.errors import InvalidRequest

SHORT: dict[str, Any] = {"input": "Hello", "extra_body": {"structured_outputs": {"choice": ["Hello there."]}}, "background": True}
LONG: dict[str, Any] = {"input": "Hello", "extra_body": {"structured_outputs": {"regex": "[a-z ]{9999}"}}, "background": True}
LIMITS = StoreLimits(64 << 20, 3600.0)
RUNNING = ("queued", "in_progress")


def client_of(server: Any, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(tools_server) -> Iterator[openai.OpenAI]:
    with client_of(tools_server) as client:
        yield client


def when(client: openai.OpenAI, response_id: str, *, running: bool = False) -> Any:
    """Waits until a response has ended, or with `running` until it has an output, and returns it."""
    deadline = time.monotonic() + 60
    while True:
        response = client.responses.retrieve(response_id)
        if (response.status not in RUNNING) or (running and response.output_text):
            return response
        assert time.monotonic() < deadline, response
        time.sleep(0.02)


def test_a_response_is_made_after_its_answer(client):
    made = client.responses.create(model="tools", **SHORT)
    assert made.background and made.status in (*RUNNING, "completed")  # it is short
    done = when(client, made.id)
    assert (done.status, done.output_text) == ("completed", "Hello there.")
    assert done.usage.output_tokens > 0
    assert client.responses.input_items.list(made.id).data[0].content[0].text == "Hello"
    again = client.responses.cancel(made.id)
    assert again.status == "completed", "what has ended stays as it is"
    client.responses.create(model="tools", input="And?", previous_response_id=made.id, max_output_tokens=2)


def test_a_running_response_is_seen_and_cancelled(client, tools_server):
    made = client.responses.create(model="tools", **LONG)
    seen = when(client, made.id, running=True)
    assert seen.status == "in_progress"
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="tools", input="And?", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text.startswith(seen.output_text)
    assert cancelled.usage.output_tokens > 0, "what was made of it"
    assert client.responses.cancel(made.id).output == client.responses.retrieve(made.id).output == cancelled.output
    tools_server.wait_until_idle()


def test_a_running_response_is_deleted(client, tools_server):
    made = client.responses.create(model="tools", **LONG)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    tools_server.wait_until_idle()


def test_a_stream_is_left_and_resumed(client):
    with client.responses.create(model="tools", **LONG, stream=True) as stream:
        first = [next(stream) for _ in range(8)]
    assert [event.type for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = first[0].response.id
    rest = iter(client.responses.retrieve(response_id, stream=True, starting_after=3))
    assert [event.model_dump() for event in first[4:]] == [next(rest).model_dump() for _ in first[4:]]
    client.responses.cancel(response_id)
    events = list(rest)
    assert [event.sequence_number for event in events] == list(range(8, 8 + len(events))), "it goes on to the end"
    kept = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in kept] == list(range(8 + len(events)))
    assert kept[-1].type == "response.output_item.done"
    text = "".join(event.delta for event in kept if event.type == "response.output_text.delta")
    assert text == client.responses.retrieve(response_id).output_text


def test_events_have_the_types_of_the_client(tools_server):
    body = {"model": "tools", **SHORT, **SHORT["extra_body"], "stream": True}
    del body["extra_body"]
    text = tools_server.http.post("/v1/responses", json=body).text
    checked = pydantic.TypeAdapter(ResponseStreamEvent)
    events = [checked.validate_json(block.split("\ndata: ")[1], strict=True) for block in text.strip().split("\n\n")]
    assert events[-1].type == "response.completed"
    path = f"/v1/responses/{events[0].response.id}"
    assert tools_server.http.get(path, params={"stream": "true"}).text == text
    assert tools_server.http.get(path, params={"stream": "true", "starting_after": events[-1].sequence_number}).text == ""


@pytest.mark.parametrize(
    ("fields", "query", "param"),
    [
        ({"background": True, "store": False}, None, "background"),
        ({"background": False}, {"stream": "true"}, "stream"),
        ({"background": True}, {"stream": "true"}, "stream"),
        ({"background": True, "stream": True}, {"stream": "true", "starting_after": "x"}, "starting_after"),
        ({}, {"starting_after": "1"}, "starting_after"),
        ({}, {"stream": "1"}, "stream"),
    ],
)
def test_what_is_wrong_is_named(tools_server, fields, query, param):
    answer = tools_server.http.post("/v1/responses", json={"model": "tools", "input": "x", "max_output_tokens": 2, **fields})
    if query is not None:
        response_id = answer.text.split('"id":"')[1].split('"')[0]
        answer = tools_server.http.get(f"/v1/responses/{response_id}", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_what_has_ended_is_neither_cancelled_nor_failed():
    writer = ResponseWriter({"status": "in_progress", "output": []}, frozenset())
    writer.end("stop", {})
    assert b'"response.completed"' in writer.fail(ApiError(500, "while it was stored")), "the last event is not lost"
    assert writer.cancel() == writer.fail(ApiError(500, "too late")) == b""
    assert writer.response["status"] == "completed"


class Run:
    """The making of a response, without an engine."""

    owner = None

    def __init__(self) -> None:
        self.writer = ResponseWriter({"id": new_response_id(""), "status": "in_progress", "output": []}, frozenset())

    async def chunks(self) -> AsyncGenerator[bytes]:
        yield self.writer.begin()
        yield self.writer.end("stop", {}) + self.writer.last_event()

    def stored(self, events: bytes | None = None) -> StoredResponse:
        response = self.writer.snapshot()
        return StoredResponse(None, response["status"], json.dumps(response).encode(), background=True, events=events)


class BadDisk(MemoryStore):
    """A store whose disk is full, or hangs."""

    is_shared = True
    fails = hangs = False

    async def update(self, response_id: str, stored: StoredResponse) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise OSError("full")
        await super().update(response_id, stored)

    async def keep(self, response_id: str) -> bool:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().keep(response_id)

    async def _forget(self, response_id: str) -> None:
        if self.fails and response_id in self._responses:
            raise OSError("full")
        await super()._forget(response_id)


async def test_on_a_full_disk_a_response_waits_in_memory(monkeypatch):
    monkeypatch.setattr(background, "KEEP_SECONDS", 0.01)
    store = BadDisk(LIMITS)
    made_here = BackgroundResponses(store, OpenRequests())
    store.fails = True
    made: Any = await made_here.start(Run(), has_events=False)
    await made.ended.wait()
    assert (await made_here.get(made.id, None)).status == "completed"
    assert (await store.get(made.id, None)).status == "queued"
    with pytest.raises(ApiError) as error:
        await made_here.delete(made.id, None)
    assert (error.value.status, error.value.detail.code) == (503, "store_failed")
    store.fails = False
    await made_here.finish(asyncio.Event())
    assert (await store.get(made.id, None)).status == "completed"


class DyingDisk(MemoryStore):
    """A store whose disk fails once a cancellation was asked for."""

    asked: str | None = None

    async def ask_to_cancel(self, response_id: str) -> None:
        self.asked = response_id

    async def _find(self, response_id: str) -> StoredResponse | None:
        if self.asked == response_id:
            raise TimeoutError("the disk has not answered")
        return await super()._find(response_id)


async def test_a_cancellation_tells_of_a_disk_that_fails():
    store = DyingDisk(LIMITS)
    await store.put(other_pods := new_response_id(""), StoredResponse(None, "in_progress", b"{}", background=True))
    with pytest.raises(ApiError, match="the disk has not answered") as error:
        await BackgroundResponses(store, OpenRequests()).cancel(other_pods, None)
    assert error.value.status == 503


async def test_a_disk_that_hangs_holds_nobody_for_long(monkeypatch):
    for name in ("END_SECONDS", "CANCEL_SECONDS"):
        monkeypatch.setattr(background, name, 0.01)
    store, over = BadDisk(LIMITS), asyncio.Event()
    store.hangs = True
    made_here = BackgroundResponses(store, OpenRequests())
    made: Any = await made_here.start(Run(), has_events=False)
    assert (await made_here.cancel(made.id, None)).status == "in_progress"
    over.set()
    async with asyncio.timeout(60):
        await made_here.finish(over)


async def test_events_that_will_not_be_stored_are_for_who_follows():
    made: Any = BackgroundResponse(Run(), lambda size: size <= 10, has_events=True)
    followed = made.events(-1)
    made.add(b"data: 1\n\n")
    assert await anext(followed) == b"data: 1\n\n"
    made.add(b"data: 2\n\n")
    assert await anext(followed) == b"data: 2\n\n"
    await followed.aclose()
    made.add(b"data: 3\n\n")
    with pytest.raises(InvalidRequest, match="not stored"):
        made.events(-1)


def test_what_the_engine_refuses_has_its_own_status(start_server):
    server = start_server(
        "--max-num-seqs=1",
        "--max-num-waiting=1",
        "--kv-cache-memory-bytes=64MiB",
        "--served-model-name=m",
        "--accept-seconds=0",
        "--max-stored-bytes=32000",
    )
    with client_of(server) as client:
        large = {**SHORT, "input": "x " * 1250}
        first = client.responses.create(model="m", **large)
        assert when(client, first.id).status == "completed"
        with pytest.raises(openai.BadRequestError, match="too large to be stored") as refused:
            client.responses.create(model="m", **large, previous_response_id=first.id)
        assert refused.value.param == "background"
        choice = {"structured_outputs": {"choice": ["word " * 400]}}
        grown = client.responses.create(model="m", input=large["input"], extra_body=choice, background=True)
        assert when(client, grown.id).status == "completed"
        with pytest.raises(openai.BadRequestError, match="too large to be stored") as refused:
            client.responses.create(model="m", input="And?", previous_response_id=grown.id)
        assert refused.value.param == "previous_response_id"
        made = [client.responses.create(model="m", **LONG) for _ in range(2)]
        assert made[1].status == "queued"
        with pytest.raises(openai.RateLimitError):
            client.responses.create(model="m", **LONG)
        assert client.responses.cancel(made[1].id).status == "cancelled", "one that waits"
        with client.responses.create(model="m", input="Hello", stream=True) as stream:
            assert [next(stream).type for _ in range(2)] == ["response.created", "response.in_progress"], "before its first token"
            with pytest.raises(openai.RateLimitError):
                client.responses.create(model="m", input="Hello", stream=True)
        assert client.responses.retrieve(made[0].id).status == "in_progress", "nothing else has run meanwhile"
    server.signal(signal.SIGINT)
    assert server.wait_for_exit() == 0, "what nobody can read later is not waited for"
    assert "responses in the background end with the server" in server.errors


def test_servers_share_a_folder(start_server, tmp_path):
    flags = ("--kv-cache-memory-bytes=64MiB", "--served-model-name=m", f"--response-store={tmp_path}", "--accept-seconds=0")
    keys = ("--api-key=first-key", "--api-key=second-key", "--prefix-cache-salt=none")
    first, second = start_server(*flags, *keys), start_server(*flags, *keys)
    with (
        client_of(first, "first-key") as here,
        client_of(second, "first-key") as there,
        client_of(second, "second-key") as stranger,
    ):
        done = here.responses.create(model="m", **SHORT, stream=True)
        done_id = list(done)[-1].response.id
        assert when(there, done_id).output_text == "Hello there."
        assert list(there.responses.retrieve(done_id, stream=True))[-1].type == "response.completed"
        there.responses.create(model="m", input="And?", previous_response_id=done_id, max_output_tokens=2)

        made = here.responses.create(model="m", **LONG)
        assert there.responses.retrieve(made.id).status in RUNNING
        for call in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.ConflictError):
            there.responses.retrieve(made.id, stream=True)
        there.responses.cancel(made.id)  # it answers what is known when the other server has not done so in time
        assert when(there, made.id).status == "cancelled"
        assert here.responses.retrieve(made.id).status == "cancelled"

        made = here.responses.create(model="m", **LONG)
        there.responses.delete(made.id)
        first.wait_until_idle()
        assert not any(made.id in file.name for file in tmp_path.iterdir())

        limited = here.responses.create(model="m", **LONG, max_output_tokens=300)
        first.signal()
        assert first.wait_for_exit() == 0, "it is waited for"
        assert there.responses.retrieve(limited.id).status == "incomplete"

        cut = there.responses.create(model="m", **LONG)
        second.signal()
        second.wait_for_line("closed")
        second.signal()
        assert second.wait_for_exit() == 1
    failed = json.loads(asyncio.run(FolderStore(tmp_path, LIMITS).get(cut.id, cache_salt_of(b"first-key"))).response)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "shutting down" in failed["error"]["message"]
    assert not any(b"first-key" in file.read_bytes() for file in tmp_path.iterdir())


def test_a_disk_that_hangs_is_a_503_and_no_neighbour_waits(start_server, tmp_path):
    """A FIFO in place of a response hangs whoever opens it. As many are asked for as the store has threads."""
    server = start_server("--kv-cache-memory-bytes=64MiB", "--served-model-name=m", f"--response-store={tmp_path}")
    hung = [new_response_id("") for _ in range(THREADS)]
    with client_of(server) as client, ThreadPoolExecutor(THREADS) as callers:
        done = client.responses.create(model="m", **SHORT)
        assert when(client, done.id).status == "completed"
        for response_id in hung:
            os.mkfifo(tmp_path / response_id)
        one = callers.submit(server.http.get, f"/v1/responses/{hung[0]}")
        time.sleep(0.2)
        assert client.responses.retrieve(done.id).status == "completed", "the other threads"
        rest = [callers.submit(server.http.delete, f"/v1/responses/{response_id}") for response_id in hung[1:]]
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=1)
        assert not one.done(), "a chat waits for no disk"
        for answer in (one.result(), *(future.result() for future in rest)):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "store_failed"
            assert "the disk has not answered within 10 seconds" in answer.json()["error"]["message"]
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="the disk has not answered"):
            client.responses.create(model="m", input="And?", previous_response_id=done.id)
        assert time.monotonic() - began < DISK_SECONDS, "nothing queues behind threads that hang"
        assert client.responses.create(model="m", input="Hello", max_output_tokens=1).store, "its writer does not hang"
    server.signal()
    assert server.wait_for_exit() == 0, "no thread that hangs is waited for"
