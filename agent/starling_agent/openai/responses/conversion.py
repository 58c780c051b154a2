"""Makes a chat of a request for a response, and of the items of earlier ones."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from starling_engine.errors import InvalidRequest

from starling_agent.openai.field_names import OwnName
from starling_agent.openai.protocol.base import refuse_unknown, shown, text_in
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.tools import KINDS, check_callers, checked_name

HOSTED = frozenset(
    (
        "apply_patch", "image_generation", "local_shell", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_preview",
    )
)  # fmt: skip
"""Tools that OpenAI runs, or that its models alone know. Clients offer them to every server and live without them."""
ELSEWHERE = frozenset(("code_interpreter", "computer", "computer_use_preview", "file_search", "mcp"))
"""Likewise, which nobody offers without counting on them: they name the user's files, servers or machines."""
OTHER_FIELDS = ("type", "allowed_callers", "async", "defer_loading", "output_schema")
"""Fields of a tool besides those of a chat's. `defer_loading` and `output_schema` change nothing."""
TEXT_PARTS = ("input_text", "output_text")
NAMESPACED = "{namespace}.{name}"
"""The model's name of a tool in a namespace: two namespaces may have tools of one name."""


class OwnTool(NamedTuple):
    """A tool as the request names it; the model knows it by one name."""

    name: str
    namespace: str | None


class _Tool(NamedTuple):
    """A tool of a request, where it stands, and its namespace."""

    param: str
    fields: dict[str, Any]
    namespace: str | None

    @property
    def name(self) -> Any:
        """The model's name of the tool."""
        return _name_in(self.namespace, self.fields.get("name"))


class ChatItems:
    """Items of a conversation as messages of a chat: reasoning, text and calls of one turn become one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._instructions: list[str] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.call_paths: list[str] = []
        """Paths of the items that are calls, in their order."""

    def instruct(self, text: str) -> None:
        """Adds to the message of the system at the beginning, of which templates take one."""
        self._instructions.append(text)

    def add(self, items: Iterable[Any], param: str) -> None:
        """Adds items. Raises InvalidRequest with the path of the fault."""
        for i, item in enumerate(items):
            self._item(item, f"{param}[{i}]")

    def add_earlier(self, items: Iterable[Any]) -> None:
        """Adds items of the responses before. The request does not have them, so errors name the field that leads to them."""
        for item in items:
            self._item(item, "previous_response_id")

    def messages(self) -> list[dict[str, Any]]:
        """Returns the chat's messages."""
        self._end_turn()
        system = [{"role": "system", "content": "\n\n".join(self._instructions)}] if self._instructions else []
        return [*system, *self._messages]

    def _item(self, item: object, param: str) -> None:
        if not isinstance(item, dict):
            raise InvalidRequest(f"an item must be an object, got {shown(item)}", param)
        match item.get("type", "message"):
            case "message":
                self._message(item, param)
            case "reasoning":
                self._reasoning += _texts(item.get("content") or [], f"{param}.content", ("reasoning_text",))
            case "function_call":
                self._call(item, "function", "arguments", param)
            case "custom_tool_call":
                self._call(item, "custom", "input", param)
            case "function_call_output" | "custom_tool_call_output":
                self._end_turn()
                text = _content(item.get("output"), f"{param}.output", TEXT_PARTS)
                self._messages.append({"role": "tool", "tool_call_id": text_in(item, "call_id", param), "content": text})
            case "additional_tools":
                tools = item.get("tools")
                if not isinstance(tools, list) or not all(map(_is_hosted, tools)):
                    raise InvalidRequest("must be a list of tools that OpenAI hosts; others are for tools", f"{param}.tools")
            case "item_reference":
                raise InvalidRequest("items are not stored one by one; send the item, or previous_response_id", f"{param}.type")
            case kind:
                raise InvalidRequest(f"items of the type {shown(kind)} are not supported", f"{param}.type")

    def _message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequest(f"must be user, assistant, system or developer, got {shown(role)}", f"{param}.role")
        text = _content(item.get("content"), f"{param}.content", (*TEXT_PARTS, "refusal"))
        if role == "assistant":
            self._texts.append(text)
            return
        self._end_turn()
        if role != "user" and all(message["role"] == "system" for message in self._messages):
            self.instruct(text)
        else:
            self._messages.append({"role": role, "content": text})

    def _call(self, item: dict[str, Any], kind: str, text: str, param: str) -> None:
        """Adds a call of a tool of that kind; `text` is the name of the field with what the tool was told."""
        namespace = None if item.get("namespace") is None else text_in(item, "namespace", param)
        called = {"name": _name_in(namespace, text_in(item, "name", param)), text: text_in(item, text, param)}
        self.call_paths.append(param)
        self._calls.append({"id": text_in(item, "call_id", param), "type": kind, kind: called})

    def _end_turn(self) -> None:
        """Makes the assistant's message of its last items."""
        if not (self._reasoning or self._texts or self._calls):
            return
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(message)
        self._reasoning, self._texts, self._calls = [], [], []


def input_items(body: ResponsesRequest) -> list[Any]:
    """Returns the request's items; a text is a message of the user."""
    if body.input is None:
        return []
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise InvalidRequest(f"must be a text or a list of items, got {shown(body.input)}", "input")
    return body.input


def chat_fields(body: ResponsesRequest, earlier: Sequence[Any]) -> tuple[dict[str, Any], Iterator[OwnName]]:
    """Returns the fields of the chat, and the items' names for its calls, as `fields_named` takes them.

    `earlier` are the items of the responses before. Raises InvalidRequest.
    """
    chat = ChatItems()
    chat.add_earlier(earlier)
    chat.add(input_items(body), "input")
    messages = chat.messages()
    if body.instructions:
        # They come before all else, and hold for this response alone.
        first = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        messages.insert(0, {"role": "system", "content": f"{body.instructions}\n\n{first}".rstrip()})
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "speculative": body.speculative,
        **body.form_fields(),
        **_logprobs(body),
    }
    tools = list(_tools(body.tools or (), "tools"))
    if body.tools:
        fields["tools"] = [_as_offered(tool) for tool in tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice, tools)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body)
    return fields, itertools.chain(_names_of_calls(messages, chat.call_paths), _names_of_tools(tools))


def _names_of_calls(messages: Sequence[dict[str, Any]], paths: Sequence[str]) -> Iterator[OwnName]:
    calls = ((i, j) for i, message in enumerate(messages) for j, _ in enumerate(message.get("tool_calls", ())))
    for (i, j), path in zip(calls, paths, strict=True):
        yield OwnName(r"^(\.(function|custom))?", path, f"messages[{i}].tool_calls[{j}]")


def _names_of_tools(tools: Sequence[_Tool]) -> Iterator[OwnName]:
    for i, tool in enumerate(tools):
        yield OwnName(r"^\.custom\.format\.grammar", f"{tool.param}.format", f"tools[{i}]")
        yield OwnName(r"^\.(function|custom)(?=\.|$)", tool.param, f"tools[{i}]")


def own_tools(body: ResponsesRequest) -> Mapping[str, OwnTool]:
    """Returns what the request calls its tools, by the model's names for them."""
    tools = _tools(body.tools or (), "tools")
    return {tool.name: OwnTool(tool.fields["name"], tool.namespace) for tool in tools}


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    wanted = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if wanted else {}


def _tools(tools: Sequence[Any], param: str, namespace: str | None = None) -> Iterator[_Tool]:
    """Yields functions and custom tools, also those of namespaces. Tools that OpenAI hosts are left out."""
    for i, tool in enumerate(tools):
        path = f"{param}[{i}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"a tool must be an object, got {shown(tool)}", path)
        match tool.get("type"):
            case "function" | "custom":
                yield _Tool(path, tool, namespace)
            case "namespace" if namespace is None:
                inner = tool.get("tools")
                if not isinstance(inner, list):
                    raise InvalidRequest(f"must be a list of tools, got {shown(inner)}", f"{path}.tools")
                yield from _tools(inner, f"{path}.tools", checked_name(tool.get("name"), f"{path}.name"))
            case str(kind) if kind in HOSTED:
                continue
            case str(kind) if kind in ELSEWHERE:
                raise InvalidRequest(f"OpenAI alone runs this tool, got {kind!r}", f"{path}.type")
            case kind:
                possible = "function, custom or namespace" if namespace is None else "function or custom in a namespace"
                raise InvalidRequest(f"must be {possible}, got {shown(kind)}", f"{path}.type")


def _name_in(namespace: str | None, name: Any) -> Any:
    """Returns the model's name of a tool. What is no text stays as it is, to be refused as a name."""
    return name if namespace is None or not isinstance(name, str) else NAMESPACED.format(namespace=namespace, name=name)


def _as_offered(tool: _Tool) -> dict[str, Any]:
    """Returns a tool as a chat has it. Raises InvalidRequest for fields that ask for more."""
    fields = {**tool.fields, "name": tool.name}
    kind = fields["type"]
    refuse_unknown(fields, (*KINDS[kind], *OTHER_FIELDS), tool.param)
    check_callers(fields, tool.param)
    if fields.get("async"):
        raise InvalidRequest("each call has to be answered before the model goes on; leave it out", f"{tool.param}.async")
    kept = {name: fields[name] for name in KINDS[kind] if fields.get(name) is not None}
    match kept:
        case {"format": {"type": "grammar", **grammar}}:
            kept["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: kept}


def _tool_choice(choice: Any, offered: Sequence[_Tool]) -> Any:
    match choice:
        case {"type": "function" | "custom"}:
            return _chosen(choice)
        case {"type": "allowed_tools", **others}:
            tools = others.get("tools")
            if isinstance(tools, list):
                others["tools"] = [one for tool in tools if not _is_hosted(tool) for one in _allowed(tool, offered)]
            return {"type": "allowed_tools", "allowed_tools": others}
        case dict():
            possible = "a function, a custom tool or allowed_tools"
            raise InvalidRequest(f"must be {possible}, got {shown(choice.get('type'))}", "tool_choice.type")
    return choice


def _allowed(tool: Any, offered: Sequence[_Tool]) -> list[Any]:
    """Returns the tools that an entry of `allowed_tools` means: one, or all of a namespace."""
    match tool:
        case {"type": "namespace", "name": str(namespace)}:
            return [_chosen({**one.fields, "namespace": namespace}) for one in offered if one.namespace == namespace] or [tool]
    return [_chosen(tool)]


def _chosen(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        return tool
    return {"type": kind, kind: {"name": _name_in(tool.get("namespace"), tool.get("name"))}}


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") in HOSTED


def _format(body: ResponsesRequest) -> dict[str, Any]:
    assert body.text is not None and body.text.format is not None
    form = body.text.format
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise InvalidRequest("text.format.schema is required", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def _content(content: object, param: str, kinds: tuple[str, ...]) -> str:
    return content if isinstance(content, str) else "".join(_texts(content, param, (*kinds, "text")))


def _texts(content: object, param: str, kinds: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(content, list):
        raise InvalidRequest(f"must be a text or a list of parts, got {shown(content)}", param)
    for i, part in enumerate(content):
        path = f"{param}[{i}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"a part must be an object, got {shown(part)}", path)
        kind = part.get("type")
        if kind in ("input_image", "input_file", "input_audio", "computer_screenshot"):
            raise InvalidRequest("images, audio and files are not supported yet", f"{path}.type")
        if kind not in kinds:
            raise InvalidRequest(f"must be {' or '.join(kinds)} here, got {shown(kind)}", f"{path}.type")
        yield text_in(part, "refusal" if kind == "refusal" else "text", path)
