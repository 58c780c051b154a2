"""Structured output over HTTP and through OpenAI's client: what comes has the form that was asked for."""

import enum
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

CHAT, COMPLETION, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
QUESTION = [{"role": "user", "content": "What does len() do?"}]
MANY = 2500
"""More tokens than any output here has, with all white space that JSON may have."""
PROMPTS = {
    CHAT: {"messages": QUESTION},
    COMPLETION: {"prompt": "import os"},
    RESPONSE: {"model": "pydoc", "input": QUESTION, "max_output_tokens": MANY},
    MESSAGE: {"model": "pydoc", "messages": QUESTION, "max_tokens": MANY},
}


class Kind(enum.StrEnum):
    BUILTIN = "builtin"
    MODULE = "module"


class Argument(BaseModel):
    name: str = Field(max_length=8, pattern="^[a-z]+$")
    optional: bool


class Function(BaseModel):
    kind: Kind
    rank: int = Field(ge=0, le=99)
    arguments: list[Argument] = Field(max_length=2)
    returns: Argument | None


SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 10, "maximum": 99}, "kind": {"enum": ["list", "dict"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[ab]{3}"}, "end": "</a>"},
}
FORMAT_FIELD = "response_format.json_schema.schema"
EBNF = 'root ::= "list" | "dict"'


def is_thing(text: str) -> bool:
    return jsonschema_rs.is_valid(SCHEMA, json.loads(text))


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def matches(pattern: str):
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS = [
    ({"response_format": FORMAT}, is_thing),
    ({"structured_outputs": {"json": SCHEMA}}, is_thing),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        matches(r"\{\"size\":\d\d,\"kind\":\"\w+\"\}"),
    ),
    ({"guided_json": SCHEMA}, is_thing),
    ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, matches("[0-9]{3}-[a-f]{2}")),
    ({"guided_regex": "[0-9]{3}"}, matches("[0-9]{3}")),
    ({"structured_outputs": {"choice": ["yes", "no, never"]}}, matches("yes|no, never")),
    ({"guided_choice": ["yes", "no"]}, matches("yes|no")),
    ({"structured_outputs": {"grammar": EBNF}}, matches("list|dict")),
    ({"guided_grammar": 'start: "list" | "dict"'}, matches("list|dict")),
    ({"response_format": TAG}, matches("<a>[ab]{3}</a>")),
]


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(("fields", "is_right"), FORMS, ids=lambda value: "" if callable(value) else str(value)[:60])
def test_every_output_has_the_form_and_ends_with_it(http, path, fields, is_right):
    answer = http.post(path, json={**PROMPTS[path], **fields, "n": 3, "temperature": 1.5, "seed": 7, "max_tokens": MANY})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert is_right(choice["text"] if path == COMPLETION else choice["message"]["content"])


OTHERS = [
    (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}}, is_thing),
    (MESSAGE, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, is_thing),
    *((path, fields, is_right) for path in (RESPONSE, MESSAGE) for fields, is_right in FORMS if "response_format" not in fields),
]


@pytest.mark.parametrize(("path", "fields", "is_right"), OTHERS, ids=lambda value: "" if callable(value) else str(value)[:60])
def test_responses_and_messages_have_their_own_field_and_vllms(http, path, fields, is_right):
    answer = http.post(path, json={**PROMPTS[path], **fields, "temperature": 1.0})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    (part,) = found["output"][0]["content"] if path == RESPONSE else found["content"]
    assert is_right(part["text"])


@pytest.mark.parametrize("path", PROMPTS)
def test_a_request_does_without_drafts_on_every_route(server, path):
    """Most tokens of a choice are forced: they are jump-forward, and the same without."""
    chosen = "of this text the first token says all that comes behind it"
    jumps = []
    for fields in ({}, {"speculative": False}):
        server.wait_until_idle()
        before = server.metric("starling:jump_forward_tokens_total")
        answer = server.http.post(path, json={**PROMPTS[path], "guided_choice": [chosen], **fields})
        assert answer.status_code == 200 and chosen in answer.text
        server.wait_until_idle()
        jumps.append(server.metric("starling:jump_forward_tokens_total") - before)
    assert jumps[0] > 3 and jumps[1] == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_stream_has_the_form_too(http, path):
    settings = {**PROMPTS[path], "response_format": FORMAT, "temperature": 0, "max_tokens": MANY}
    whole = http.post(path, json=settings).json()["choices"][0]
    lines = [line.removeprefix("data: ") for line in http.post(path, json={**settings, "stream": True}).text.split("\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    text = "".join(choice["text"] if path == COMPLETION else choice["delta"].get("content", "") for choice in choices)
    assert text == (whole["text"] if path == COMPLETION else whole["message"]["content"])
    assert is_thing(text)
    assert choices[-1]["finish_reason"] == "stop"


def test_any_object_is_json(http):
    """Without a bound it may be longer than `max_tokens`; one that stops is whole."""
    answers = [
        http.post(CHAT, json={**PROMPTS[CHAT], "response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 200}).json()
        for seed in range(6)
    ]
    choices = [answer["choices"][0] for answer in answers]
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
    assert all(is_object(choice["message"]["content"]) for choice in choices if choice["finish_reason"] == "stop")
    assert all(choice["message"]["content"].startswith("{") for choice in choices)


def test_a_form_ends_also_below_min_tokens(http):
    """Some tokens have several letters, so the form is whole before there are 40."""
    body = {"prompt": "a", "guided_regex": "(import){8}", "min_tokens": 40, "max_tokens": MANY}
    answer = http.post(COMPLETION, json=body).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("import" * 8, "stop")


def test_every_prompt_of_a_request_has_the_form(http):
    body = {"prompt": ["import", "class", "def"], "guided_choice": ["yes", "no"], "max_tokens": MANY, "logprobs": 1}
    choices = http.post(COMPLETION, json=body).json()["choices"]
    assert len(choices) == 3 and {choice["text"] for choice in choices} <= {"yes", "no"}


@pytest.mark.parametrize(("max_tokens", "output"), [(0, ""), (MANY, "yes")])
def test_an_echoed_prompt_is_not_part_of_the_form(http, max_tokens, output):
    body = {"prompt": "import os", "guided_choice": ["yes"], "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    choice = http.post(COMPLETION, json=body).json()["choices"][0]
    assert choice["text"] == f"import os{output}"


IMPOSSIBLE = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "set"}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"json": {"type": "array", "items": {"$dynamicRef": "#a"}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
    ({"guided_json": False}, "guided_json"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "nothing"}}}, "response_format"),
]


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"prompt": ["a", "b"], "stream": True}], ids=str)
@pytest.mark.parametrize(("fields", "param"), IMPOSSIBLE, ids=str)
def test_a_form_that_cannot_be_enforced_is_refused_before_anything_starts(idle_server, http, fields, param, more):
    answer = http.post(COMPLETION, json={"prompt": "a", **fields, **more})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert idle_server.is_idle()


TOO_LARGE_BEHIND = {
    "type": "object",
    "properties": {"size": {"enum": ["large", "small"]}, "name": {"type": "string", "pattern": f"^[b-y]{'a?' * 900}z$"}},
    "required": ["size", "name"],
    "additionalProperties": False,
}
"""A schema in whose second property the library finds more states than it keeps."""
FUTILE = [
    ({"guided_choice": ["yes", "no"], "allowed_token_ids": [300]}, "guided_choice", "with allowed_token_ids it leaves no token"),
    ({"response_format": FORMAT, "allowed_token_ids": [300], "banned_token_ids": [5]}, FORMAT_FIELD, "banned_token_ids it leaves"),
    ({"guided_json": TOO_LARGE_BEHIND}, "guided_json", "too many expressions"),
]


def last_event(stream: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(stream.split("data: ")[-1])
    return event


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "words"), FUTILE, ids=["first", "all", "later"])
def test_a_form_that_leaves_no_token_is_a_fault_of_the_request_which_names_the_fields(http, path, stream, fields, param, words):
    answer = http.post(path, json={**PROMPTS[path], **fields, "stream": stream})
    error = (answer.json() if answer.status_code == 400 else last_event(answer.text))["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param) and words in error["message"], error


def test_a_response_has_its_own_name_for_the_field(http):
    text = {"format": {"type": "json_schema", "name": "a", "schema": TOO_LARGE_BEHIND}}
    error = http.post("/v1/responses", json={"input": "a", "text": text}).json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "text.format.schema"), error


def test_the_clients_parse_gives_a_pydantic_model(client):
    compact = {"structured_outputs": {"disable_any_whitespace": True}}
    for settings in ({"temperature": 0}, {"temperature": 1.2, "seed": 3}, {"temperature": 1.2, "extra_body": compact}):
        answer = client.chat.completions.parse(
            model="pydoc", messages=QUESTION, response_format=Function, max_tokens=MANY, **settings
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Function)
        assert choice.message.refusal is None


def test_the_clients_stream_gives_one_too(client):
    settings = {"model": "pydoc", "messages": QUESTION, "response_format": Function, "max_tokens": MANY, "temperature": 0}
    with client.beta.chat.completions.stream(**settings) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.done" in kinds
    assert isinstance(final.choices[0].message.parsed, Function)
    assert final.choices[0].message.parsed == client.beta.chat.completions.parse(**settings).choices[0].message.parsed


def test_an_output_that_was_cut_is_no_parsed_one(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="pydoc", messages=QUESTION, response_format=Function, max_tokens=3)
