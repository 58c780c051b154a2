"""The events of streams, and clients that disconnect or read slowly."""

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from anthropic.types import ErrorResponse
from openai.types import Completion
from starling_agent.http.open_requests import OpenRequests
from starling_agent.openai.event_stream import EventStream
from starling_engine.errors import EngineDead

from tests.naming_client import named

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "import", "max_tokens": 3000, "ignore_eos": True}


def events(text: str) -> list[Any]:
    """Returns the data of each event, parsed except for [DONE]."""
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_chunks_of_completions_fit_the_sdk_but_for_the_null_before_the_end(http):
    """OpenAI's server sends it, and its SDK has one type for chunks and for whole answers (docs/clients.md)."""
    answer = http.post(COMPLETION, json={"prompt": "import", "max_tokens": 3, "stream": True, "logprobs": 1})
    errors = []
    for chunk in events(answer.text)[:-1]:
        try:
            Completion.model_validate(chunk, strict=True)
        except pydantic.ValidationError as error:
            errors += [(fault["loc"][-1], fault["input"]) for fault in error.errors()]
    assert set(errors) == {("finish_reason", None)}


def test_a_chats_stream_has_role_text_end_and_done(http):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True, "ignore_eos": True}
    answer = http.post(CHAT, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    first, *middle, finish, done = events(answer.text)
    assert done == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    for chunk in middle:
        assert list(chunk["choices"][0]["delta"]) == ["content"]
        assert "usage" not in chunk


def test_usage_comes_last_and_is_null_before(http):
    body = {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(http.post(COMPLETION, json=body).text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_token_ids_are_in_the_answer_if_wanted(http):
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = http.post(COMPLETION, json=body).json()["choices"][0]
    chunks = events(http.post(COMPLETION, json={**body, "stream": True}).text)
    streamed = [token for chunk in chunks[:-1] for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == whole["token_ids"]
    assert whole["prompt_token_ids"] == http.post("/tokenize", json={"prompt": "a"}).json()["tokens"]


def test_logprobs_name_tokens_by_id_if_wanted(http):
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    tokens = http.post(COMPLETION, json=body).json()["choices"][0]["logprobs"]["tokens"]
    assert all(token.startswith("token_id:") for token in tokens)


def test_the_prompts_log_probabilities_are_in_the_answer(http):
    body = {"prompt": "A list is", "max_tokens": 1, "prompt_logprobs": 2}
    tables = http.post(COMPLETION, json=body).json()["choices"][0]["prompt_logprobs"]
    assert tables[0] is None
    for table in tables[1:]:
        assert len(table) in (2, 3)
        assert {"logprob", "rank", "decoded_token"} == set(next(iter(table.values())))


def test_the_answer_has_the_requests_id(http):
    body = {"prompt": "a", "max_tokens": 1}
    answer = http.post(COMPLETION, json=body, headers={"X-Request-Id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json()["id"].startswith("cmpl-mine-7-")
    assert http.post(COMPLETION, json={**body, "request_id": "other"}).json()["id"].startswith("cmpl-other-")
    spoiled = http.post(COMPLETION, json=body, headers={"X-Request-Id": "a b"})
    assert spoiled.headers["x-request-id"] != "a b"


def test_one_request_id_may_be_used_twice_at_once(http):
    body = {"prompt": "a", "max_tokens": 64, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: http.post(COMPLETION, json=body, headers={"X-Request-Id": "same"}), range(4))
        assert [answer.status_code for answer in answers] == [200] * 4


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1/models/", "/v1/models//"])
def test_paths_with_too_many_slashes_are_answered(server, path):
    assert server.http.get(server.url + path).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request(server, stream):
    with contextlib.closing(raw_post(server, COMPLETION, {**LONG, "stream": stream, "n": 2})) as client:
        _wait_for(lambda: server.metric("vllm:num_requests_running") == 2)
        if stream:
            assert client.recv(100)
    before = server.metric("vllm:generation_tokens_total")
    server.wait_until_idle()
    assert server.metric("vllm:generation_tokens_total") - before < 3000
    assert 'finished_reason="abort"' in server.http.get("/metrics").text


def test_a_disconnect_in_the_body_starts_nothing(server):
    server.wait_until_idle()
    with contextlib.closing(_connect(server)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    assert server.http.get("/health").status_code == 200
    assert server.is_idle()


def test_many_disconnects_at_once_leave_an_idle_engine(server):
    before = server.metric("vllm:generation_tokens_total")
    clients = [raw_post(server, COMPLETION, {**LONG, "stream": True}) for _ in range(24)]
    _wait_for(lambda: server.metric("vllm:num_requests_running") >= 12)
    for client in clients:
        client.close()
    server.wait_until_idle()
    assert server.metric("vllm:generation_tokens_total") - before < 12 * LONG["max_tokens"]


def test_a_slow_reader_delays_no_other_request(server):
    """The client reads nothing until its request has ended, and then gets all of it.

    The echoed prompt with twenty candidates for each token makes megabytes: more than sockets hold.
    """
    body = {"prompt": "list of " * 600, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 40, "ignore_eos": True}
    with contextlib.closing(raw_post(server, COMPLETION, {**body, "stream": True}, receive_buffer=2048)) as client:
        assert client.recv(10)
        quick = server.http.post(COMPLETION, json={"prompt": "b", "max_tokens": 8, "ignore_eos": True})
        assert quick.json()["usage"]["completion_tokens"] == 8
        server.wait_until_idle(seconds=60)
        text = _read_all(client)
    assert len(text) > 2_000_000
    assert text.count(b'"finish_reason":"length"') == 4
    assert b"data: [DONE]" in text


def test_streams_side_by_side_do_not_mix(http):
    def one(index: int) -> tuple[str, str]:
        body = {"prompt": f"{index} import", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        whole = http.post(COMPLETION, json={**body, "cache_salt": f"{index}"}).json()["choices"][0]["text"]
        chunks = events(http.post(COMPLETION, json={**body, "stream": True}).text)
        return whole, "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        pairs = list(pool.map(one, range(16)))
    # bf16 kernels may differ with the batch; a mixed-up stream differs at its first token.
    assert all(whole[:3] == streamed[:3] for whole, streamed in pairs)


def _connect(server: Any, receive_buffer: int | None = None) -> socket.socket:
    url = httpx.URL(server.url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(30)
    client.connect((url.host, url.port))
    return client


def raw_post(server: Any, path: str, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    content = json.dumps(named(path, body, server.http.model)).encode()
    client = _connect(server, receive_buffer)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def _read_all(client: socket.socket) -> bytes:
    """Reads to the last chunk of the chunked answer."""
    pieces = [b""]
    while not pieces[-1].endswith(b"0\r\n\r\n"):
        pieces.append(client.recv(65536))
        assert pieces[-1], "the answer was cut"
    return b"".join(pieces)


def _wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("path", "begin"), [("/v1/messages", "event: error\ndata: "), ("/v1/chat/completions", "data: ")])
async def test_an_error_in_a_stream_has_the_form_of_its_api(path, begin):
    sent: list[Any] = []

    async def chunks() -> AsyncGenerator[bytes]:
        raise EngineDead("the engine has died")
        yield b""

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": [], "state": {"request_id": "r1"}}
    async with asyncio.timeout(60):
        await EventStream(b"", chunks(), OpenRequests())(scope, asyncio.Event().wait, send)
    event = sent[-1]["body"].decode()
    assert event.startswith(begin)
    body = json.loads(event.removeprefix(begin))
    assert body["error"]["code"] == "engine_dead" and body.get("request_id") == ("r1" if path == "/v1/messages" else None)
    if path == "/v1/messages":
        pydantic.TypeAdapter(ErrorResponse).validate_python(body, strict=True)
        return
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=event))) as http:
        client = openai.OpenAI(api_key="none", http_client=http)
        with pytest.raises(openai.APIError, match="the engine has died") as error:
            list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], stream=True))
        assert error.value.code == "engine_dead"
