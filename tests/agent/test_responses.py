"""The Responses API, through OpenAI's client and its types."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

QUESTION = "What is the weather in Zürich?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Changes files."}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ALL = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
CUSTOM = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n+a"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(tools_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def settings(raw: str, **more: Any) -> dict[str, Any]:
    extra = {"structured_outputs": {"choice": [raw]}}
    return {"model": "tools", "input": QUESTION, "tools": [WEATHER, PATCH], "extra_body": extra, **more}


def plain(response: Response) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]


def test_reasoning_text_and_calls_are_items_in_their_order(client):
    response = client.responses.create(**settings(ALL))
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Let me see.")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Zürich"})
    assert (response.status, response.output_text) == ("completed", "Let me see.")
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


@pytest.mark.parametrize("raw", [ALL, CUSTOM, "Hello."], ids=["all", "custom", "text"])
def test_every_event_has_the_types_of_the_client_and_they_add_up(client, tools_server, raw):
    body = {key: value for key, value in settings(raw).items() if key != "extra_body"}
    body |= {"stream": True, "structured_outputs": {"choice": [raw]}}
    answer = tools_server.http.post("/v1/responses", json=body)
    checked = pydantic.TypeAdapter(ResponseStreamEvent)
    events = []
    for number, block in enumerate(answer.text.strip().split("\n\n")):
        name, data = block.split("\n")
        events.append(checked.validate_json(data.removeprefix("data: "), strict=True))
        assert (name, events[-1].sequence_number) == (f"event: {events[-1].type}", number)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert plain(events[-1].response) == plain(client.responses.create(**settings(raw)))
    for kind in ("output_text", "reasoning_text", "function_call_arguments", "custom_tool_call_input"):
        deltas = "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        done = [event for event in events if event.type == f"response.{kind}.done"]
        name = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}.get(kind, "text")
        assert deltas == "".join(getattr(event, name) for event in done)
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(events[-1].response.output)))


def test_the_clients_own_stream(client):
    extra = {"structured_outputs": {"choice": [ALL]}}
    with client.responses.stream(model="tools", input=QUESTION, tools=[WEATHER], extra_body=extra) as stream:
        final = stream.get_final_response()
    assert plain(final) == plain(client.responses.create(**settings(ALL)))


def test_a_custom_tool_is_called_with_a_text(client):
    (call,) = client.responses.create(**settings(CUSTOM)).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** Begin Patch\n+a")


def test_a_response_is_continued_seen_and_deleted(client):
    first = client.responses.create(**settings(ALL), instructions="Be brief.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12 °C"}
    second = client.responses.create(
        model="tools",
        input=[output],
        previous_response_id=first.id,
        tools=[WEATHER, PATCH],
        instructions="Be brief.",
        max_output_tokens=2,
    )
    assert second.previous_response_id == first.id
    assert second.status == "incomplete" and second.incomplete_details.reason == "max_output_tokens"
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output == first.output
    items = client.responses.input_items.list(first.id).data
    assert items[0].content == QUESTION or items[0].content[0].text == QUESTION
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="tools", input="x", previous_response_id=first.id)
    third = client.responses.create(model="tools", input="And tomorrow?", previous_response_id=second.id, max_output_tokens=2)
    alone = client.responses.create(model="tools", input="And tomorrow?", max_output_tokens=2)
    assert third.usage.input_tokens > alone.usage.input_tokens


def test_what_is_not_to_be_stored_is_not(client):
    response = client.responses.create(**settings("x"), store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stateless_conversation_as_agents_send_it(client):
    """Codex and others send all items again, reasoning included, and offer tools that OpenAI hosts."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Zürich"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "12 °C"},
    ]  # fmt: skip
    response = client.responses.create(
        model="tools", input=items, tools=[WEATHER, {"type": "web_search"}], max_output_tokens=3, store=False,
        include=["reasoning.encrypted_content"], reasoning={"effort": "medium", "summary": "auto"}, parallel_tool_calls=True,
        prompt_cache_key="k", extra_body={"client_metadata": {"a": "b"}},
    )  # fmt: skip
    assert response.status == "incomplete"


def test_logprobs_come_with_the_text(client):
    response = client.responses.create(**settings("Hello."), top_logprobs=2)
    entries = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries).startswith("Hello.")
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_form_of_the_text(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    response = client.responses.create(model="tools", input=QUESTION, text=form, max_output_tokens=100, temperature=0)
    assert json.loads(response.output_text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "custom_made"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": 1000.0}, "temperature"),
        ({"nothing": 1}, "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named(tools_server, fields, param):
    answer = tools_server.http.post("/v1/responses", json={"model": "tools", "input": "x", "max_output_tokens": 2, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_response_belongs_to_the_key_that_made_it(start_server):
    flags = ("--kv-cache-memory-bytes=64MiB", "--accept-seconds=0", "--api-key=one", "--api-key=two", "--prefix-cache-salt=none")
    server = start_server(*flags, "--served-model-name=pydoc")
    url, body = f"{server.url}/v1/responses", {"model": "pydoc", "input": "x", "max_output_tokens": 1}
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = httpx.post(url, json=body, headers=one, timeout=60).json()["id"]
    assert httpx.get(f"{url}/{made}", headers=two).status_code == 404
    assert httpx.delete(f"{url}/{made}", headers=two).status_code == 404
    assert httpx.post(f"{url}/{made}/cancel", headers=two).status_code == 404
    assert httpx.post(url, json={**body, "previous_response_id": made}, headers=two, timeout=60).status_code == 404
    assert httpx.get(f"{url}/{made}", headers=one).json()["id"] == made
    assert httpx.post(f"{url}/{made}/cancel", headers=one).status_code == 400
    assert httpx.delete(f"{url}/{made}", headers=one).json()["deleted"] is True
