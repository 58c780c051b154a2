"""The Messages API, through Anthropic's own client and its types."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Zürich?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ALL = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
TWO = f"{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def client(tools_server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tools_server.url, api_key="none", max_retries=0) as client:
        yield client


def settings(raw: str, **more: Any) -> dict[str, Any]:
    extra = {"structured_outputs": {"choice": [raw]}}
    return {"model": "tools", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 400, "extra_body": extra, **more}


def plain(message: Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True, exclude={"id", "signature"}) for block in message.content]


def test_reasoning_text_and_calls_are_blocks_in_their_order(client):
    message = client.messages.create(**settings(ALL))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == ("Hm.", "Let me see.")
    assert (call.name, call.input) == ("get_weather", {"city": "Zürich"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 0


def test_thinking_may_be_left_out(client):
    asked = settings(ALL, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    asked["max_tokens"] = 2000
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == "" and whole.content[0].signature
    with client.messages.stream(**asked) as stream:
        assert not [event for event in stream if event.type == "thinking"]
        assert plain(stream.get_final_message()) == plain(whole)


@pytest.mark.parametrize("raw", [ALL, TWO, "Hello."], ids=["all", "two", "text"])
def test_the_clients_own_stream_adds_up_to_the_whole_message(client, raw):
    whole = client.messages.create(**settings(raw))
    with client.messages.stream(**settings(raw)) as stream:
        streamed = stream.get_final_message()
    assert plain(streamed) == plain(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    totals = [message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) for message in (whole, streamed)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("limit", [25, 32, 40])
def test_a_call_that_is_cut_has_the_same_arguments_whole_and_in_the_clients_stream(client, limit):
    raw = CALL.replace('"Zürich"', '{"n": 1, "at": [2, "Bern and more"]}')
    whole = client.messages.create(**{**settings(raw), "max_tokens": limit})
    with client.messages.stream(**{**settings(raw), "max_tokens": limit}) as stream:
        assert plain(stream.get_final_message()) == plain(whole)
    assert whole.stop_reason == "max_tokens" and bool(whole.content[0].input) == (limit > 25)


@pytest.mark.parametrize("value", ["[" * 1000, '"\\ud83d' + "Bern " * 500], ids=["nesting", "half a character"])
def test_a_call_that_is_cut_where_nothing_reads_its_beginning_has_no_arguments(client, value):
    message = client.messages.create(**settings(CALL.replace('"Zürich"', value)))
    assert message.stop_reason == "max_tokens" and message.content[-1].input == {}


@pytest.mark.parametrize("raw", [ALL, TWO, "Hello."], ids=["all", "two", "text"])
def test_every_event_has_the_types_of_the_client(tools_server, raw):
    body = {"model": "tools", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 400, "stream": True}
    answer = tools_server.http.post("/v1/messages", json={**body, "structured_outputs": {"choice": [raw]}})
    checked = pydantic.TypeAdapter(RawMessageStreamEvent)
    kinds = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        kinds.append(fields["type"])
        assert name == f"event: {fields['type']}"
        if fields["type"] != "ping":
            checked.validate_json(data.removeprefix("data: "), strict=True)
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def test_the_models_have_the_types_of_the_client(client, tools_server):
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("tools", "model", "tools")
    answer = tools_server.http.get("/v1/models/tools", headers={"anthropic-version": "2023-06-01"})
    info = pydantic.TypeAdapter(ModelInfo).validate_json(answer.content, strict=True)
    card = tools_server.http.get("/v1/models/tools").json()
    assert info.max_input_tokens == card["max_model_len"] == card["context_length"]
    assert info.created_at.timestamp() == card["created"]
    assert card["architecture"]["input_modalities"] == ["text"]
    with pytest.raises(anthropic.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.body["error"]["type"] == "not_found_error"


def test_a_conversation_with_tools_goes_on(client):
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Zürich"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "12 °C"}]},
                {"type": "text", "text": "And tomorrow?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(model="tools", max_tokens=3, messages=messages, system=system, tools=[WEATHER])
    assert message.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="tools", messages=messages, system=system, tools=[WEATHER]).input_tokens
    assert counted == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    fewer = client.messages.count_tokens(model="tools", messages=QUESTION).input_tokens
    assert fewer < counted


def test_an_answer_may_be_begun(client):
    begun = [*QUESTION, {"role": "assistant", "content": "The weather is"}]
    whole = client.messages.count_tokens(model="tools", messages=begun).input_tokens
    assert client.messages.create(model="tools", max_tokens=2, messages=begun).usage.output_tokens == 2
    assert whole > client.messages.count_tokens(model="tools", messages=QUESTION).input_tokens


def test_reasons_to_stop(client):
    def reason(**more: Any) -> tuple[str | None, str | None]:
        message = client.messages.create(**settings("one two three", **more))
        return message.stop_reason, message.stop_sequence

    assert reason() == ("end_turn", None)
    assert reason(stop_sequences=["two"]) == ("stop_sequence", "two")
    assert reason(max_tokens=2) == ("max_tokens", None)


def test_the_contexts_end_is_no_error(tools_server):
    for text, reasons in (("a " * 3900, ("end_turn", "model_context_window_exceeded")),):
        body = {"model": "tools", "max_tokens": 1_000_000, "messages": [{"role": "user", "content": text}]}
        answer = tools_server.http.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] in reasons
    too_long = {**body, "messages": [{"role": "user", "content": "a " * 9000}]}
    assert tools_server.http.post("/v1/messages", json=too_long).status_code == 400
    counted = tools_server.http.post("/v1/messages/count_tokens", json={k: v for k, v in too_long.items() if k != "max_tokens"})
    assert counted.json()["input_tokens"] > 4096


def test_a_forced_call(client):
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    message = client.messages.create(
        model="tools", max_tokens=200, messages=QUESTION, tools=[WEATHER], tool_choice=choice, extra_body={"temperature": 0}
    )
    assert [block.type for block in message.content] == ["tool_use"]


UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "object", "$dynamicRef": "#x"}}}
USE = {"type": "tool_use", "id": "one", "name": "get_weather", "input": {}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": "x"} for name in ("one", "two")]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": []}]}]}, "messages[0].content[0].input"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tools": [WEATHER | {"allowed_callers": "direct"}]}, "tools[0].allowed_callers"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"name": "f", "input_schema": UNSUPPORTED}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"system": "x", "messages": [*QUESTION, {"role": "assistant", "content": [USE]}]}, "messages[1].content[0]"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": [USE]}, RESULT]}, "messages[2].content[1].tool_use_id"),
        ({"system": {}}, "system"),
        ({"system": 0}, "system"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"top_k": "x"}, "top_k"),
        ({"nothing": 1}, "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named(tools_server, fields, param):
    body = {"model": "tools", "messages": QUESTION, "max_tokens": 5, **fields}
    answer = tools_server.http.post("/v1/messages", json=body)
    error = answer.json()
    assert answer.status_code == 400, answer.text
    assert (error["type"], error["error"]["type"], error["error"]["param"]) == ("error", "invalid_request_error", param)
    assert error["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_request_without_a_model_gets_the_names_of_those_that_there_are(tools_server, path):
    content = json.dumps({"messages": QUESTION})
    answer = tools_server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "model")
    assert error["message"] == "model is required; this server has tools"


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**settings("x"), "model": "claude"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**settings("x", extra_body={"temperature": -1.0}))


def test_keys_come_as_anthropics_clients_send_them(start_server):
    server = start_server("--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--api-key=secret", "--served-model-name=pydoc")
    body = {"model": "pydoc", "messages": QUESTION, "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/messages", json=body, headers={"X-Api-Key": "secret"}).status_code == 200
    assert httpx.post(f"{server.url}/v1/messages", json=body, headers={"X-Api-Key": "wrong"}).status_code == 401
    assert httpx.post(f"{server.url}/v1/messages", json=body, headers={"Authorization": "Bearer secret"}).status_code == 200
