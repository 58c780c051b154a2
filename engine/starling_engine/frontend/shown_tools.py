"""Shows tools and calls of them in chat templates that have no place for them but the texts of messages."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from starling_engine.frontend.template import CompiledTemplate

Message = dict[str, Any]
TOOLS_PROMPT = "You are a helpful assistant with some tools."
"""The system message that tools are shown in where a conversation has none: that of Phi-4-mini's description."""


class ShownCalls(NamedTuple):
    """The texts in which a model writes calls.

    opens        before the first call of a message
    begins       before a call's name
    named        between its name and its arguments
    ends         behind them
    between      between calls
    closes       behind the last call
    answer_role  the role of answers to calls
    as_python    arguments are written as Python's; otherwise as a JSON object
    """

    opens: str
    begins: str
    named: str
    ends: str
    between: str
    closes: str
    answer_role: str
    as_python: bool = False

    def text(self, calls: Sequence[Any]) -> str:
        """Returns what the model wrote of the calls."""
        return f"{self.opens}{self.between.join(self._call(call['function']) for call in calls)}{self.closes}"

    def _call(self, function: dict[str, Any]) -> str:
        name, arguments = function["name"], function["arguments"]
        if self.as_python:
            return f"{self.begins}{name}{self.named}{', '.join(f'{key}={_python(arguments[key])}' for key in arguments)}{self.ends}"
        return f"{self.begins}{_json(name)[1:-1]}{self.named}{_json(arguments)}{self.ends}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _python(value: Any) -> str:
    """Returns a JSON value as Python writes it, but for texts, whose quotes are double ones."""
    match value:
        case dict():
            return f"{{{', '.join(f'{_json(key)}: {_python(one)}' for key, one in value.items())}}}"
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case bool() | None:
            return str(value)
    return _json(value)


def with_tools_and_calls(
    messages: list[Message], tools: list[Any] | None, template: CompiledTemplate, calls: ShownCalls | None
) -> list[Message]:
    """Returns the messages for a template: with the tools, if it wants them there, and with calls, if it shows none by itself."""
    if tools and template.shows_tools_of_messages:
        messages = _with_tools(messages, tools)
    if calls is not None and not template.shows_calls:
        messages = [_with_calls(message, calls) for message in messages]
    return messages


def _with_tools(messages: list[Message], tools: list[Any]) -> list[Message]:
    """Puts the tools into the first message as JSON, as Phi-4-mini's template reads them."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": TOOLS_PROMPT}, *messages]
    return [{**messages[0], "tools": _json([tool.get("function", tool) for tool in tools])}, *messages[1:]]


def _with_calls(message: Message, calls: ShownCalls) -> Message:
    if message["role"] == "tool":
        return {**message, "role": calls.answer_role}
    if not message.get("tool_calls"):
        return message
    content, text = message.get("content", ""), calls.text(message["tool_calls"])
    return {**message, "content": [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text}
