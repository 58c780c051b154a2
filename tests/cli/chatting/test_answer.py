"""Tests what the chunks of several servers' streams make."""

import pytest
from starling_agent.parsers.events import Content, Reasoning
from starling_cli.chatting.answer import StreamedAnswer
from starling_cli.chatting.client import api_root

CITY, TIME = {"name": "get_weather", "arguments": '{"city": "Paris"}'}, {"name": "time", "arguments": "{}"}


def joined(*deltas):
    answer = StreamedAnswer()
    pieces = [piece for delta in deltas for piece in answer.add({"choices": [{"index": 0, "delta": delta}]})]
    return pieces, answer.message()


def part(arguments, **more):
    return {"function": {"arguments": arguments}, **more}


def head(name, call_id, arguments="", **more):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


STREAMS = {
    # OpenAI: an index in each piece, id and name in the first one alone.
    "fragments": [
        {"role": "assistant", "content": None, "tool_calls": [head("get_weather", "a", index=0)]},
        *({"tool_calls": [part(text, index=0)]} for text in ('{"ci', 'ty": "Pa', 'ris"}')),
        {"tool_calls": [head("time", "b", index=1)]},
        {"tool_calls": [part("{}", index=1)]},
        {},
    ],
    # Servers of whole calls: all in one chunk.
    "whole": [{"content": "", "tool_calls": [head(**CITY, call_id="a", index=0), head(**TIME, call_id="b", index=1)]}],
    # Gemini's adapter: whole calls that all have the index 0, or none.
    "one index": [{"tool_calls": [head(**CITY, call_id="a", index=0)]}, {"tool_calls": [head(**TIME, call_id="b", index=0)]}],
    "no index": [{"tool_calls": [head(**CITY, call_id="a")]}, {"tool_calls": [head(**TIME, call_id="b")]}],
    # A server that repeats id and name, and leaves out the arguments of a call without any.
    "repeated": [
        {"tool_calls": [head("get_weather", "a", '{"city": ', index=0)]},
        {"tool_calls": [head("get_weather", "a", '"Paris"}', index=0), head("time", "b", None, index=1)]},
    ],
}


@pytest.mark.parametrize("deltas", STREAMS.values(), ids=STREAMS)
def test_calls_of_any_server_are_whole(deltas):
    pieces, message = joined(*deltas)
    assert pieces == []
    calls = [{"id": i, "type": "function", "function": function} for i, function in (("a", CITY), ("b", TIME))]
    assert message == {"role": "assistant", "content": None, "tool_calls": calls}


def test_calls_without_an_id_get_different_ones():
    _, message = joined({"tool_calls": [head("f", None, index=0), head("f", None, index=1)]})
    assert len({call["id"] for call in message["tool_calls"]} - {""}) == 2


@pytest.mark.parametrize(
    "fields", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")], ids=["new", "old", "both"]
)
def test_reasoning_under_either_name_is_shown_once(fields):
    pieces, message = joined(dict.fromkeys(fields, "Hm."), {"content": "Ye"}, {"content": "s."})
    assert pieces == [Reasoning("Hm."), Content("Ye"), Content("s.")]
    assert message == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_stays_beside_calls_under_its_name(field):
    _, message = joined({field: "Hm"}, {field: "."}, {"tool_calls": [head(**TIME, call_id="b", index=0)]})
    assert message[field] == "Hm."


def test_chunks_without_choices_say_nothing():
    answer = StreamedAnswer()
    assert answer.add({"choices": [], "usage": {"total_tokens": 3}}) == answer.add({"choices": [{"finish_reason": "stop"}]}) == []
    assert answer.message() == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"),
        ("https://api.groq.com/openai/v1", "https://api.groq.com/openai/v1"),
        ("https://generativelanguage.googleapis.com/v1beta/openai/", "https://generativelanguage.googleapis.com/v1beta/openai"),
        ("https://api.z.ai/api/paas/v4", "https://api.z.ai/api/paas/v4"),
        ("http://v1.example.com/models", "http://v1.example.com/models/v1"),
    ],
)
def test_urls_with_and_without_a_version(url, expected):
    assert api_root(url) == expected
