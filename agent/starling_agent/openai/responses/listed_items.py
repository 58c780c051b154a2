"""Writes the items of a stored response's input as OpenAI's API lists them: clients may leave out what follows from the rest."""

from collections.abc import Mapping
from typing import Any

from starling_agent.openai.responses.conversion import TEXT_PARTS

_STATUS = {"status": "completed"}
_ALWAYS: Mapping[str, Mapping[str, Any]] = {"reasoning": {"summary": []}}
"""Fields that listed items of a type have."""


def listed_item(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Returns an item with the fields that OpenAI's types require. `number` is its place in the input, and makes its id."""
    kind = item.get("type", "message")
    listed = {"id": f"item_{number}", "type": kind, **_ALWAYS.get(kind, _STATUS), **_given(item)}
    if kind == "message":
        listed["content"] = _parts(listed.get("content"), listed.get("role"))
    return listed


def _parts(content: Any, role: Any) -> Any:
    """Returns a message's content as a list of parts; one of another form as it is."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    return [_part(part, role) for part in content if isinstance(part, Mapping)]


def _part(part: Mapping[str, Any], role: Any) -> dict[str, Any]:
    """Returns a part; the type of a text follows the role, whatever the client called it."""
    if part.get("type") not in ("text", *TEXT_PARTS):
        return dict(part)
    if role == "assistant":
        return {"annotations": [], **_given(part), "type": "output_text"}
    return {"type": "input_text", "text": part.get("text", "")}


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields without those that are null: clients write null for what they leave out."""
    return {name: value for name, value in fields.items() if value is not None}
