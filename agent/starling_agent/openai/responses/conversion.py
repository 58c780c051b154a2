"""Makes a chat of a request for a response, and of the items of earlier ones."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starling_engine.errors import InvalidRequest

from starling_agent.openai.protocol.base import shown, text_in
from starling_agent.openai.responses.protocol import ResponsesRequest

HOSTED = frozenset(
    (
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "local_shell",
        "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search", "web_search_preview",
    )
)  # fmt: skip
"""Tools that OpenAI runs, or that its models alone know. Clients offer them to every server and live without them."""
TEXT_PARTS = ("input_text", "output_text")
CUSTOM_INPUT = "input"
"""The argument that holds the text of a call of a custom tool, which for the model is a function."""


class ChatItems:
    """Items of a conversation as messages of a chat: reasoning, text and calls of one turn become one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def instruct(self, text: str) -> None:
        """Adds to the message of the system at the beginning, of which templates take one."""
        if self._messages and self._messages[0]["role"] == "system":
            self._messages[0]["content"] += f"\n\n{text}"
        else:
            self._messages.insert(0, {"role": "system", "content": text})

    def add(self, items: Iterable[Any], param: str) -> None:
        """Adds items. Raises InvalidRequest with the path of the fault."""
        for i, item in enumerate(items):
            self._item(item, f"{param}[{i}]")

    def messages(self) -> list[dict[str, Any]]:
        """Returns the chat's messages."""
        self._end_turn()
        return self._messages

    def _item(self, item: object, param: str) -> None:
        if not isinstance(item, dict):
            raise InvalidRequest(f"an item must be an object, got {shown(item)}", param)
        match item.get("type", "message"):
            case "message":
                self._message(item, param)
            case "reasoning":
                self._reasoning += _texts(item.get("content") or [], f"{param}.content", ("reasoning_text",))
            case "function_call":
                self._call(item, text_in(item, "arguments", param), param)
            case "custom_tool_call":
                self._call(item, json.dumps({CUSTOM_INPUT: text_in(item, "input", param)}), param)
            case "function_call_output" | "custom_tool_call_output":
                self._end_turn()
                text = _content(item.get("output"), f"{param}.output", TEXT_PARTS)
                self._messages.append({"role": "tool", "tool_call_id": text_in(item, "call_id", param), "content": text})
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

    def _call(self, item: dict[str, Any], arguments: str, param: str) -> None:
        function = {"name": text_in(item, "name", param), "arguments": arguments}
        self._calls.append({"id": text_in(item, "call_id", param), "type": "function", "function": function})

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


def chat_fields(body: ResponsesRequest, earlier: Sequence[Any]) -> dict[str, Any]:
    """Returns the fields of the chat. `earlier` are the items of the responses before. Raises InvalidRequest."""
    chat = ChatItems()
    chat.add(earlier, "previous_response_id")
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
        **_logprobs(body),
    }
    if body.tools:
        fields["tools"] = list(_tools(body.tools))
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body)
    if body.structured_outputs is not None:
        fields["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    return fields


def custom_tools(body: ResponsesRequest) -> frozenset[str]:
    """Returns the names of tools whose calls are texts."""
    tools = (tool for tool in body.tools or () if isinstance(tool, dict))
    return frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom")


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    wanted = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if wanted else {}


def _tools(tools: list[Any]) -> Iterator[dict[str, Any]]:
    for i, tool in enumerate(tools):
        param = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"a tool must be an object, got {shown(tool)}", param)
        match tool.get("type"):
            case "function":
                yield _function(tool, tool.get("parameters"))
            case "custom":
                described = {"type": "string", "description": "The whole input, as text."}
                schema = {"type": "object", "properties": {CUSTOM_INPUT: described}, "required": [CUSTOM_INPUT]}
                yield _function(tool, schema)
            case str(kind) if kind in HOSTED:
                continue
            case kind:
                raise InvalidRequest(f"must be function or custom, got {shown(kind)}", f"{param}.type")


def _function(tool: dict[str, Any], parameters: Any) -> dict[str, Any]:
    kept = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**kept, "parameters": parameters}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict):
        raise InvalidRequest(f"must be a function or a custom tool, got {shown(choice.get('type'))}", "tool_choice.type")
    return choice


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
