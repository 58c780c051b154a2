"""Checks a chat's messages and converts them for chat templates."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from starling_engine.errors import InvalidRequest

from starling_agent.openai.custom_tools import INPUT
from starling_agent.openai.protocol.base import refuse_unknown, shown, text_in
from starling_agent.parsers.json_text import whole_json

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_SHOWN = 8
"""Ids that an error shows."""
IGNORED_FIELDS = ("provider_specific_fields",)
"""Fields of gateways that send back what they themselves put into an answer."""
EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call")
"""Fields of answers that clients send back in the history; they are always empty yet."""
KNOWN_FIELDS = (
    *("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"),
    *EMPTY_FIELDS,
    *IGNORED_FIELDS,
)

MEDIA_PARTS = ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "video", "file", "image_embeds")


def template_messages(messages: list[Any], param: str = "messages") -> list[dict[str, Any]]:
    """Converts messages for the chat template. Raises InvalidRequest with the path of the fault."""
    if not messages:
        raise InvalidRequest("there must be at least one message", param)
    converted = [_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]
    for i, message in enumerate(converted):
        if "tool_calls" in message:
            _check_answers(converted, i, param)
    return converted


def predicted_text(prediction: dict[str, Any] | None) -> str | None:
    """Returns the text of a predicted output. Raises InvalidRequest with the path of the fault."""
    if prediction is None:
        return None
    if prediction.get("type") != "content":
        raise InvalidRequest(f"must be 'content', got {shown(prediction.get('type'))}", "prediction.type")
    refuse_unknown(prediction, ("type", "content"), "prediction")
    content = _content(prediction.get("content"), "prediction.content")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message(message: object, param: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"a message must be an object, got {shown(message)}", param)
    for name in EMPTY_FIELDS:
        if message.get(name):
            raise InvalidRequest(f"{name} in messages is not supported yet", f"{param}.{name}")
    role = _role(message, param)
    answer: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    if calls:
        answer["tool_calls"] = _tool_calls(calls, role, f"{param}.tool_calls")
    if message.get("content") is not None or role != "assistant":
        answer["content"] = _content(message.get("content"), f"{param}.content")
    else:
        answer["content"] = ""  # many templates read it of every message
    if (call := _text(message, "tool_call_id", param)) is not None:
        answer["tool_call_id"] = call
    if (speaker := _text(message, "name", param)) is not None:
        answer["name"] = speaker
    reasoning = _text(message, "reasoning_content", param) or _text(message, "reasoning", param)
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    refuse_unknown(message, KNOWN_FIELDS, param)
    return answer


def _check_answers(messages: Sequence[dict[str, Any]], at: int, param: str) -> None:
    """Raises InvalidRequest for a call of a message without an answer right behind it: no model was trained on that.

    Likewise for an answer there to none of its calls, and for a second one; calls and answers without ids go by their number.
    """
    calls = messages[at]["tool_calls"]
    end = next((k for k in range(at + 1, len(messages)) if messages[k]["role"] != "tool"), len(messages))
    ids, answers = [call.get("id") for call in calls], [message.get("tool_call_id") for message in messages[at + 1 : end]]
    called, answered = Counter(ids), set(answers)
    for j, call in enumerate(calls):
        if call.get("id") not in answered and len(answers) < len(calls):
            name = call.get("id") or call["function"]["name"]
            raise InvalidRequest(f"the call {shown(name)} has no answer right behind it", f"{param}[{at}].tool_calls[{j}]")
    seen: Counter[str | None] = Counter()
    for j, answer in enumerate(answers):
        where = f"{param}[{at + 1 + j}].tool_call_id"
        if answer is not None and None not in called and answer not in called:
            known = ", ".join(map(shown, ids[:MOST_SHOWN])) + (", ..." if len(ids) > MOST_SHOWN else "")
            raise InvalidRequest(f"no call before has the id {shown(answer)}; it has {known}", where)
        if answer is not None and seen[answer] >= max(1, called[answer]):
            raise InvalidRequest(f"the call {shown(answer)} has an answer already", where)
        seen[answer] += 1


def _role(message: dict[str, Any], param: str) -> str:
    role = message.get("role")
    if role == "function":
        raise InvalidRequest("'function' is not supported; its newer name is 'tool'", f"{param}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"must be one of {', '.join(ROLES)}, got {shown(role)}", f"{param}.role")
    # Templates know no developer role; for OpenAI's own models it is the newer name of system.
    return "system" if role == "developer" else role


def _tool_calls(calls: object, role: str, param: str) -> list[dict[str, Any]]:
    """Converts calls of the history: their arguments come as JSON in a text, and templates expect an object."""
    if role != "assistant":
        raise InvalidRequest("only the assistant calls tools", param)
    if not isinstance(calls, list):
        raise InvalidRequest(f"must be a list, got {shown(calls)}", param)
    return [_tool_call(call, f"{param}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, param: str) -> dict[str, Any]:
    if isinstance(call, dict) and call.get("type") == "custom":
        return _call_of_custom(call, param)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"a call must be an object with a function that has a name, got {shown(call)}", param)
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(whole_json(arguments)) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"must be a JSON object in a text, got {shown(arguments)}", f"{param}.function.arguments")
    return _called(call, function["name"], parsed)


def _call_of_custom(call: dict[str, Any], param: str) -> dict[str, Any]:
    custom = call.get("custom")
    if not isinstance(custom, dict):
        raise InvalidRequest(f"must be an object with name and input, got {shown(custom)}", f"{param}.custom")
    return _called(call, text_in(custom, "name", f"{param}.custom"), {INPUT: text_in(custom, "input", f"{param}.custom")})


def _called(call: dict[str, Any], name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return identity | {"type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_text(message: dict[str, Any]) -> str:
    """Returns the text of an assistant's message; an empty one for other roles."""
    if message["role"] != "assistant":
        return ""
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _content(content: object, param: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"must be a text or a list of parts, got {shown(content)}", param)
    if not content:
        raise InvalidRequest("there must be at least one part", param)
    return [{"type": "text", "text": text_of_part(part, f"{param}[{i}]")} for i, part in enumerate(content)]


def text_of_part(part: object, param: str) -> str:
    """Returns the text of a part. Raises InvalidRequest with the path of the fault."""
    if not isinstance(part, dict):
        raise InvalidRequest(f"a part must be an object, got {shown(part)}", param)
    kind = part.get("type")
    if kind in MEDIA_PARTS:
        raise InvalidRequest("images, audio and other media are not supported yet", f"{param}.type")
    if kind not in ("text", "input_text"):
        raise InvalidRequest(f"must be 'text', got {shown(kind)}", f"{param}.type")
    text = text_in(part, "text", param)
    refuse_unknown(part, ("type", "text"), param)
    return text


def _text(message: dict[str, Any], name: str, param: str) -> str | None:
    return None if message.get(name) is None else text_in(message, name, param)
