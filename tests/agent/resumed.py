"""Streams with notes for routers, read and put together."""

import json
import re
from typing import Any

from starling_agent.contract.router import ROUTER_TOKEN
from starling_agent.openai.stream_record import LAST_NOTE, RESUMABLE, RESUME_TYPE

from tests.naming_client import NamingClient, named

TOKEN = "shared by routers"
HEADERS = {ROUTER_TOKEN: TOKEN, RESUMABLE: "yes"}
CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def noted(http: NamingClient, path: str, body: dict[str, Any], notes: list[bytes] | None = None) -> list[tuple[bytes, bytes]]:
    """Returns the parts of a stream, each with the note behind it; of one that `notes` begin, the rest. It ends as it has to."""
    content, kind = json.dumps(named(path, body, http.model)).encode(), "application/json"
    if notes is not None:
        content, kind = b"[" + b",".join(notes) + b"]\n" + content, RESUME_TYPE
    answer = http.post(path, content=content, headers={**HEADERS, "content-type": kind})
    assert answer.status_code == 200, answer.text
    assert answer.headers[RESUMABLE] == "yes"
    assert answer.content.endswith(LAST_NOTE)
    return _pairs(answer.content.removesuffix(LAST_NOTE))


def _pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    parts = re.split(rb"(?m)^: note (.*)\n\n", data)
    assert not parts.pop(), "events without a note"
    return list(zip(parts[::2], parts[1::2], strict=True))


def joined(data: bytes) -> dict[str, Any]:
    """Returns what a stream's events say, however it is cut: texts of each choice or block, and each other thing in order."""
    found: dict[str, Any] = {"order": []}
    for event in data.removesuffix(b"\n\n").split(b"\n\n"):
        payload = event.rpartition(b"\n")[2].removeprefix(b"data: ")
        if payload == b"[DONE]":
            found["order"].append("done")
        else:
            _add(found, json.loads(payload, parse_float=Score))
    return found


class Score(float):
    """A log probability. Its last digits differ where a prompt is computed in other pieces."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


def _add(found: dict[str, Any], event: dict[str, Any]) -> None:
    choices = event.pop("choices", None)
    if choices == []:
        details = event["usage"].get("completion_tokens_details") or {}
        details.pop("reasoning_tokens", None)  # where reasoning ends within a delta, texts are counted, and deltas are cut anyhow
        found["order"].append(event)
        return
    if choices is None:  # the Messages API
        _add_part(found, event.pop("index", event["type"]), event)
        return
    found.setdefault("heads", [])
    if (head := {name: event[name] for name in ("id", "created", "model", "object")}) not in found["heads"]:
        found["heads"].append(head)
    for choice in choices:
        _add_part(found, choice.pop("index"), choice)


def _add_part(found: dict[str, Any], key: object, part: dict[str, Any]) -> None:
    whole = found.setdefault(f"part {key}", {})
    for path, value in _leaves(part, ""):
        if path.endswith(".id") and str(value).startswith("call_"):
            whole.setdefault(path, []).append("call")
        elif isinstance(value, str) and path in ADDED:
            whole[path] = whole.get(path, "") + value
        elif isinstance(value, list) and value:
            whole[path] = whole.get(path, []) + value
        elif value is not None and value not in ("content_block_delta", [], ""):
            whole.setdefault(path, []).append(value)


ADDED = {
    ".text",
    *(f".delta.{name}" for name in ("content", "reasoning", "reasoning_content", "text", "thinking", "partial_json")),
    *(f".delta.tool_calls.{call}.function.arguments" for call in range(4)),
}
"""Texts that come in pieces."""


def _leaves(value: object, path: str) -> Any:
    if path == ".delta.tool_calls":
        value = {call.pop("index"): call for call in value}  # type: ignore[attr-defined]
    if not isinstance(value, dict):
        yield path, value
        return
    if value.get("type") in ("text_delta", "thinking_delta", "input_json_delta"):
        value = {name: item for name, item in value.items() if name != "type"}
    for name, item in value.items():
        yield from _leaves(item, f"{path}.{name}")
