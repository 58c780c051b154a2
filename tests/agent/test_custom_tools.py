"""Custom tools in chats: their calls are texts, which follow their grammars, in streams too."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk
from starling_agent.openai.custom_tools import InputReader
from starling_agent.openai.messages import template_messages
from starling_agent.openai.tools import calls_form, offered_tools, with_enforced_grammars
from starling_agent.parsers.families import FAMILIES
from starling_engine.errors import InvalidRequest

from tests.agent.parsers.outputs import assert_linear, equal_pieces

QUESTION: Any = [{"role": "user", "content": "Change the file."}]
PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Changes files.", "format": {"type": "text"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
TEXT = 'a "b"\n\\c\t😀\nd'
CALLS = (
    f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': TEXT}})}\n</tool_call>"
    '<tool_call>\n{"name": "weather", "arguments": {"at": 1}}\n</tool_call>'
)
CALLED: Any = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": TEXT}}


def grammar(syntax: str, definition: str, name: str = "dial") -> Any:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": name, "format": form}}


DIAL = grammar("regex", "[0-9]{3}|x")
FORCED: Any = {"type": "custom", "custom": {"name": "dial"}}


@pytest.fixture(scope="module")
def client(tools_server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def settings(raw: str, **more: Any) -> dict[str, Any]:
    extra = {"structured_outputs": {"choice": [raw]}}
    return {"model": "tools", "messages": QUESTION, "tools": [PATCH, WEATHER], "extra_body": extra, **more}


def joined(stream: Any) -> tuple[list[dict[str, Any]], list[str], str]:
    """Returns the calls that a stream's deltas add up to, the pieces of custom tools' texts, and the reason for its end."""
    calls: list[dict[str, Any]] = []
    pieces: list[str] = []
    reason = ""
    for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = delta.to_dict()
            if call.get("id") is not None:
                assert call["index"] == len(calls)
                calls.append({"type": call["type"], call["type"]: {"name": call[call["type"]]["name"]}})
            whole = calls[call["index"]]
            (field,) = call[whole["type"]].keys() - {"name"}
            whole[whole["type"]][field] = whole[whole["type"]].get(field, "") + call[whole["type"]][field]
            pieces += [call["custom"]["input"]] if whole["type"] == "custom" else []
    return calls, pieces, reason


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 0}], ids=["plain", "rich"])
def test_a_stream_has_the_calls_of_the_whole_answer(client, extra):
    choice = client.chat.completions.create(**settings(CALLS, **extra)).choices[0]
    first, second = choice.message.tool_calls
    assert (first.type, first.custom.name, first.custom.input) == ("custom", "patch", TEXT)
    assert (second.type, second.function.name, json.loads(second.function.arguments)) == ("function", "weather", {"at": 1})
    for _ in range(50):  # of a busy machine, several deltas may come as one
        calls, pieces, reason = joined(client.chat.completions.create(**settings(CALLS, stream=True, **extra)))
        assert calls == [_without_id(call) for call in (first, second)]
        if len([piece for piece in pieces if piece]) > 1:
            break
    else:
        pytest.fail("the text comes as it is written")
    assert (reason, choice.finish_reason) == ("tool_calls", "tool_calls")


def test_chunks_of_custom_calls_fit_the_sdk_but_for_their_type(client):
    """OpenAI's server sends this type, and its SDK's types of chunks have functions alone; where they grow, tools.md changes."""
    chunks = client.chat.completions.create(**settings(CALLS, stream=True))
    errors = []
    for chunk in chunks:
        try:
            ChatCompletionChunk.model_validate_json(chunk.to_json(), strict=True)
        except pydantic.ValidationError as error:
            errors += [(fault["loc"][-1], fault["input"]) for fault in error.errors()]
    assert errors == [("type", "custom")]


def _without_id(call: Any) -> dict[str, Any]:
    return {name: value for name, value in call.to_dict().items() if name != "id"}


@pytest.mark.parametrize(
    ("arguments", "begins"), [({"input": TEXT}, 'a "b'), ({"other": "a" * 99}, '{"other": "aa')], ids=["input", "other"]
)
def test_a_call_that_was_cut_has_what_there_is(client, arguments, begins):
    raw = f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    whole = client.chat.completions.create(**settings(raw, max_tokens=30)).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "length" and call.custom.input.startswith(begins)
    calls, _, reason = joined(client.chat.completions.create(**settings(raw, max_tokens=30, stream=True)))
    assert (calls, reason) == ([_without_id(call)], "length")


def test_a_forced_call_follows_its_grammar_and_a_chat_goes_on_from_it(client):
    body: dict[str, Any] = {"model": "tools", "messages": QUESTION, "tools": [WEATHER, DIAL], "temperature": 0, "max_tokens": 300}
    message = client.chat.completions.create(**body, tool_choice=FORCED).choices[0].message
    (call,) = message.tool_calls
    assert call.type == "custom" and re.fullmatch("[0-9]{3}|x", call.custom.input)
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "No answer."}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FORCED]}}
    messages = [*QUESTION, message.to_dict(), answer, *QUESTION]
    lark = grammar("lark", 'start: ("a" | "b") NUMBER\nNUMBER: /[0-9]{2}/')
    again = client.chat.completions.create(**{**body, "messages": messages, "tools": [WEATHER, lark]}, tool_choice=allowed)
    assert all(re.fullmatch("[ab][0-9]{2}", one.custom.input) for one in again.choices[0].message.tool_calls)


def test_a_call_in_the_history_is_that_of_a_function_with_one_text():
    answer = {"role": "tool", "tool_call_id": "c", "content": "Done."}
    _, assistant, _ = template_messages([*QUESTION, {"role": "assistant", "tool_calls": [CALLED]}, answer])
    assert assistant["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "patch", "arguments": {"input": TEXT}}}]
    for custom, param in ((None, "custom"), ({"name": "f"}, "custom.input"), ({"input": ""}, "custom.name")):
        with pytest.raises(InvalidRequest) as error:
            template_messages([{"role": "assistant", "tool_calls": [{"type": "custom", "custom": custom}]}])
        assert error.value.param == f"messages[0].tool_calls[0].{param}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": TEXT}), TEXT),
        (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
        (r'{ "input" : "\ud83d\ude00\ud83d\ud83d\ude00\\ud83d\ud83d", "more": "x"}', "😀\ufffd😀\\ud83d\ufffd"),
        ('{"input": ""}', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\ud83d', "a\ufffd"),
        ('{"inp', ""),
        ("", ""),
        ('{"more": 1, "input": "x"}', "x"),
        ('{"more": 1}', '{"more": 1}'),
        ('{"input": 1}', '{"input": 1}'),
    ],
)
def test_a_text_is_read_the_same_from_any_pieces(arguments, text):
    for size in (1, 2, 7, len(arguments) + 1):
        reader = InputReader()
        pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join([*pieces, reader.rest()]) == text


@pytest.mark.parametrize(
    ("begins", "repeats"),
    [("{", " "), ('{"input": "', "a"), ('{"input": "', "\\\\u00e9"), ('{"more": "', "a"), ('{"input"', "\\t")],
)
def test_arguments_are_read_in_linear_time(begins, repeats):
    def work(size: int) -> None:
        reader = InputReader()
        for text, _ in equal_pieces(begins + repeats * (size // len(repeats))):
            reader.feed(text)
        reader.rest()

    assert_linear(work, 1_000_000)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", ["auto", FORCED], ids=["auto", "forced"])
def test_a_grammar_is_enforced_or_refused_by_name(family, choice):
    tools = offered_tools([WEATHER, DIAL], choice)
    assert tools is not None
    kept = with_enforced_grammars(tools, FAMILIES[family], has_form=False)
    try:
        form = calls_form(tools, FAMILIES[family], parallel=True)
    except InvalidRequest as error:
        assert error.param == "tools[1].custom.format" and "cannot be enforced" in error.message
        assert kept.functions == tools.functions, "the model is shown the grammar"
        assert "json_string" not in str(calls_form(kept, FAMILIES[family], parallel=True))
    else:
        assert form is not None and "json_string" in str(form.value)
        assert kept is tools


@pytest.mark.parametrize(
    ("choice", "families"),
    [
        ("auto", "apriel granite hermes mistral phi4_mini phi4_mini_json"),
        (
            FORCED,
            "apriel deepseek_v3 deepseek_v31 granite hermes kimi_k2 lfm2 llama3_json llama4_json llama4_pythonic mistral openai "
            "phi4_mini phi4_mini_json",
        ),
    ],
    ids=["auto", "forced"],
)
def test_where_grammars_are_enforced(choice, families):
    tools = offered_tools([DIAL], choice)
    assert tools is not None
    held = [name for name, family in FAMILIES.items() if with_enforced_grammars(tools, family, has_form=False) is tools]
    assert " ".join(sorted(held)) == families


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**PATCH, "function": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "parameters": {}}}]}, "tools[0].custom.parameters"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": "text"}}]}, "tools[0].custom.format"),
        ({"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]}, "tools[0].custom.format.grammar"),
        ({"tools": [grammar("peg", "a")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [grammar("lark", "start: what")]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [grammar("regex", "a" * 100_001)]}, "tools[0].custom.format.grammar.definition"),
        ({"tools": [WEATHER, grammar("regex", "a", "weather")]}, "tools[1].custom.name"),
        ({"tools": [DIAL], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": FORCED}, "tool_choice.custom.name"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "weather"}}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}}},
            "tool_choice.allowed_tools.tools[0].custom.name",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named(tools_server, fields, param):
    body = {"model": "tools", "messages": QUESTION, "tools": [WEATHER], "max_tokens": 1, **fields}
    answer = tools_server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
