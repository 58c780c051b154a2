"""Makes a chat of a request of the Messages API."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from starling_engine.errors import InvalidRequest

from starling_agent.openai.anthropic.protocol import CountRequest, MessagesRequest
from starling_agent.openai.field_names import OwnName
from starling_agent.openai.protocol.base import shown, text_in
from starling_agent.openai.tools import check_callers

HOSTED = (
    "bash_",
    "browser_",
    "code_execution_",
    "computer_",
    "memory_",
    "text_editor_",
    "tool_search_",
    "web_fetch_",
    "web_search_",
    "mcp_",
)
"""Beginnings of the types of tools that Anthropic runs, or that its models alone know."""
_MEDIA = ("image", "document", "search_result", "container_upload")


class _Turn(NamedTuple):
    """A message of the chat, the path of what it was made of in the request, and the paths of its calls."""

    path: str
    message: dict[str, Any]
    calls: Sequence[str] = ()


def chat_fields(body: CountRequest) -> tuple[dict[str, Any], Iterator[OwnName]]:
    """Returns the fields of the chat, but those that say how it is sampled, and the request's names for its messages.

    The names are as `fields_named` takes them. Raises InvalidRequest with the path of the fault.
    """
    turns = _joined(_messages(body))
    messages = [turn.message for turn in turns]
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice)
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.thinking is not None and body.thinking.type != "adaptive":
        fields["reasoning_effort"] = "none" if body.thinking.type == "disabled" else "high"
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if body.output_config is not None:
        fields |= _output(body)
    return fields, _names_of_turns(turns)


def _names_of_turns(turns: Sequence[_Turn]) -> Iterator[OwnName]:
    for i, turn in enumerate(turns):
        for j, path in enumerate(turn.calls):
            yield OwnName(r"^(\.function)?", path, f"messages[{i}].tool_calls[{j}]")
        yield OwnName("^$", f"{turn.path}.tool_use_id", f"messages[{i}].tool_call_id")
        yield OwnName("^.*", turn.path, f"messages[{i}]")


def sampling_fields(body: MessagesRequest) -> dict[str, Any]:
    names = {"max_tokens": "max_completion_tokens", "stop_sequences": "stop"}
    kept = ("max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences", "speculative")
    return {names.get(name, name): getattr(body, name) for name in kept} | body.form_fields()


def _output(body: CountRequest) -> dict[str, Any]:
    assert body.output_config is not None
    form, effort = body.output_config.format, body.output_config.effort
    fields: dict[str, Any] = {}
    if effort is not None and (body.thinking is None or body.thinking.type != "disabled"):
        fields["reasoning_effort"] = effort
    if form is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    return fields


def _messages(body: CountRequest) -> Iterator[_Turn]:
    if body.system is not None and body.system not in ("", []):
        yield _Turn("system", {"role": "system", "content": "\n".join(_texts(body.system, "system"))})
    if not body.messages:
        raise InvalidRequest("there must be at least one message", "messages")
    for i, message in enumerate(body.messages):
        param = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"a message must be an object, got {shown(message)}", param)
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise InvalidRequest(f"must be user or assistant, got {shown(role)}", f"{param}.role")
        for name in message.keys() - {"role", "content"}:
            raise InvalidRequest(f"unknown field {shown(name)}", f"{param}.{name}")
        blocks = _blocks(message.get("content"), f"{param}.content")
        yield from (_assistant(param, blocks),) if role == "assistant" else _user(param, role, blocks)


def _joined(turns: Iterable[_Turn]) -> list[_Turn]:
    """Joins messages of the user that follow each other: there roles must alternate for many a template."""
    joined: list[_Turn] = []
    for role, group in itertools.groupby(turns, lambda turn: turn.message["role"]):
        first, *others = group
        if role == "user":
            content = "\n".join(turn.message["content"] for turn in (first, *others))
            joined.append(_Turn(first.path, {"role": role, "content": content}))
        else:
            joined += first, *others
    return joined


def _blocks(content: object, param: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the blocks with their paths."""
    if isinstance(content, str):
        return [(param, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise InvalidRequest(f"must be a text or a list of blocks, got {shown(content)}", param)
    blocks = [(f"{param}[{i}]", block) for i, block in enumerate(content)]
    for path, block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(f"a block must be an object with a type, got {shown(block)}", path)
        if block["type"] in _MEDIA:
            raise InvalidRequest("images and documents are not supported yet", f"{path}.type")
    return blocks


def _user(param: str, role: str, blocks: list[tuple[str, dict[str, Any]]]) -> Iterator[_Turn]:
    """Yields the results of tools, each as a message, and then the text."""
    texts: list[str] = []
    for path, block in blocks:
        match block["type"]:
            case "text":
                texts.append(text_in(block, "text", path))
            case "tool_result" if role == "user":
                yield _Turn(path, _tool_result(block, path))
            case kind:
                raise InvalidRequest(f"must be text or tool_result here, got {shown(kind)}", f"{path}.type")
    if texts or not any(block["type"] == "tool_result" for _, block in blocks):
        yield _Turn(param, {"role": role, "content": "\n".join(texts)})


def _tool_result(block: dict[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    text = "\n".join(_texts(content, f"{path}.content")) if content is not None else ""
    # Templates know no errors of tools; models are told in words.
    text = f"Error: {text}" if block.get("is_error") else text
    return {"role": "tool", "tool_call_id": text_in(block, "tool_use_id", path), "content": text}


def _assistant(param: str, blocks: list[tuple[str, dict[str, Any]]]) -> _Turn:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in blocks:
        match block["type"]:
            case "text":
                texts.append(text_in(block, "text", path))
            case "thinking":
                thoughts.append(text_in(block, "thinking", path))
            case "redacted_thinking":
                pass  # no server but Anthropic's can read it
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise InvalidRequest(f"must be an object, got {shown(arguments)}", f"{path}.input")
                function = {"name": text_in(block, "name", path), "arguments": arguments}
                calls.append({"id": text_in(block, "id", path), "type": "function", "function": function})
            case kind:
                raise InvalidRequest(f"must be text, thinking or tool_use here, got {shown(kind)}", f"{path}.type")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    paths = [path for path, block in blocks if block["type"] == "tool_use"]
    return _Turn(param, message | ({"tool_calls": calls} if calls else {}), paths)


def _tool(tool: object, param: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"a tool must be an object, got {shown(tool)}", param)
    kind = tool.get("type") or "custom"
    if kind != "custom":
        why = "this tool is one that only Anthropic's models know" if str(kind).startswith(HOSTED) else "must be custom"
        raise InvalidRequest(f"{why}, got {shown(kind)}", f"{param}.type")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"must be a JSON schema of an object, got {shown(schema)}", f"{param}.input_schema")
    known = {"name", "description", "input_schema", "type", "strict", "cache_control", "eager_input_streaming", "input_examples"}
    known |= {"defer_loading", "allowed_callers"}
    for name in tool.keys() - known:
        raise InvalidRequest(f"unknown field {shown(name)}", f"{param}.{name}")
    check_callers(tool, param)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema,
        "strict": tool.get("strict"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    for name in choice.keys() - {"type", "name", "disable_parallel_tool_use"}:
        raise InvalidRequest(f"unknown field {shown(name)}", f"tool_choice.{name}")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    match choice.get("type"):
        case "auto" | "none" as kind:
            return {"tool_choice": kind, **parallel}
        case "any":
            return {"tool_choice": "required", **parallel}
        case "tool":
            return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **parallel}
    raise InvalidRequest(f"must be auto, any, tool or none, got {shown(choice.get('type'))}", "tool_choice.type")


def _texts(content: object, param: str) -> list[str]:
    texts = []
    for path, block in _blocks(content, param):
        if block["type"] != "text":
            raise InvalidRequest(f"must be text here, got {shown(block['type'])}", f"{path}.type")
        texts.append(text_in(block, "text", path))
    return texts
