"""Requests that leave a model one answer: a random model knows no tool, and what is judged is the server around it."""

import json
from typing import Any

Body = dict[str, Any]


def saying(body: Body, text: str) -> Body:
    """Returns the body with a choice of one text, which the model writes token by token."""
    return body | {"structured_outputs": {"choice": [text]}}


def calling(body: Body, **calls: Body) -> Body:
    """Returns the body with a choice of calls, as Hermes models write them."""
    written = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls.items())
    return saying(body, "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written))


def narrowed(body: Body, arguments: dict[str, Body]) -> Body:
    """Returns a body that demands a call with the schema of each tool narrowed to its arguments, by the tool's name.

    The grammar is still the one that the server makes of the client's tools. Text between calls would not end.
    """
    tools = [_narrowed_tool(tool, arguments) for tool in body["tools"]]
    if "max_tokens" in body and "messages" in body and "input_schema" in tools[0]:
        return body | {"tools": tools, "tool_choice": body["tool_choice"] | {"disable_parallel_tool_use": True}}
    return body | {"tools": tools, "parallel_tool_calls": False}


def _narrowed_tool(tool: Body, arguments: dict[str, Body]) -> Body:
    if "function" in tool:
        return tool | {"function": _narrowed_tool(tool["function"], arguments)}
    key = "input_schema" if "input_schema" in tool else "parameters"
    return tool | {key: tool[key] | {"const": arguments[tool["name"]]}}


def shaped(body: Body, value: Body) -> Body:
    """Returns a body that demands JSON with the schema narrowed to the value."""
    schema = {**_demanded_schema(body), "const": value}
    options = {"structured_outputs": {"disable_any_whitespace": True}}
    if "text" in body:
        return body | {"text": {"format": {"type": "json_schema", "name": "narrowed", "schema": schema}}} | options
    return body | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}} | options


def _demanded_schema(body: Body) -> Body:
    """Returns the schema that a chat or a response has to fit; an empty one where it has to be JSON alone."""
    if "text" in body:
        return body["text"]["format"].get("schema", {})
    return body["response_format"].get("json_schema", {}).get("schema", {})


def demands_a_call(body: Body) -> bool:
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind in ("required", "any", "function", "tool")


def offered(body: Body) -> list[str]:
    """Returns the names of the tools that a request offers; of those without a name, their type."""
    tools = (tool.get("function", tool) for tool in body.get("tools") or ())
    return [tool.get("name") or tool["type"] for tool in tools]
