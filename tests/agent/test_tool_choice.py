"""Which tools `tool_choice` lets a model call: the grammar that enforces it, on chats and on responses."""

from typing import Any

import pytest
from starling_agent.openai.tools import calls_form, offered_tools
from starling_agent.parsers.families import FAMILIES
from starling_engine.errors import InvalidRequest

from tests.agent.parsers.test_written_calls import ARGUMENTS, SCHEMAS, written
from tests.engine.structured_output.matching import FormMatcher

TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
AMONG_TEXT = [name for name in FAMILIES if FAMILIES[name].written.possible(SCHEMAS)]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def matcher(family: str, choice: Any) -> FormMatcher:
    tools = offered_tools(TOOLS, choice)
    assert tools is not None and len(tools.functions) == len(TOOLS), "the template shows all"
    form = calls_form(tools, FAMILIES[family], parallel=True)
    assert form is not None
    return FormMatcher(structural_tag=form.value)


@pytest.mark.parametrize("family", AMONG_TEXT)
def test_other_tools_are_not_called_among_text(family):
    form = matcher(family, allowed("auto", NAMED))
    assert form.accepts("Hello.")
    assert form.accepts(written(family, "get_weather", ARGUMENTS))
    assert not form.accepts(written(family, "look", ARGUMENTS))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_tools_are_not_called_where_one_has_to_be(family):
    form = matcher(family, allowed("required", NAMED))
    assert not form.accepts("Hello.")
    assert form.accepts(written(family, "get_weather", ARGUMENTS))
    assert not form.accepts(written(family, "look", ARGUMENTS))


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - AMONG_TEXT))
def test_what_cannot_be_enforced_is_refused(family):
    tools = offered_tools(TOOLS, allowed("auto", NAMED))
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        calls_form(tools, FAMILIES[family], parallel=True)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (allowed("none", NAMED), "tool_choice.allowed_tools.mode"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        (allowed("auto", NAMED, {"type": "mcp"}), "tool_choice.allowed_tools.tools[1]"),
        (allowed("auto", {"type": "function", "function": {"name": "x"}}), "tool_choice.allowed_tools.tools[0].function.name"),
        ({"type": "allowed_tools", "tools": []}, "tool_choice.tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "some"}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named(choice, param):
    with pytest.raises(InvalidRequest) as error:
        offered_tools(TOOLS, choice)
    assert error.value.param == param


def test_a_response_calls_an_allowed_tool(tools_server):
    tools = [{"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}} for name in ("one", "two")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}, {"type": "web_search"}]}
    body = {"model": "tools", "input": "x", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    answer = tools_server.http.post("/v1/responses", json={**body, "temperature": 0, "max_output_tokens": 500}).json()
    assert [item["name"] for item in answer["output"] if item["type"] == "function_call"] == ["two"], answer
    assert answer["tool_choice"] == choice
    wrong = {**choice, "tools": [{"type": "function", "name": "three"}]}
    refused = tools_server.http.post("/v1/responses", json={**body, "tool_choice": wrong})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice.tools")
