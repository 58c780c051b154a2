"""Messages in a file, and as people read them."""

import json
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from starling_cli.chatting.answer import Message
from starling_cli.chatting.slash_commands import BadCommand

_Role = Literal["system", "developer", "user", "assistant", "tool"]


class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    function: _Function


class _Message(BaseModel):
    """A message, as far as `message_line` reads it."""

    role: _Role
    tool_calls: list[_Call] | None = None


_MESSAGES = TypeAdapter(list[_Message])


def message_line(message: Message) -> str:
    """Returns a message for people to read."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join([f"{message['role']}: {text}", *(f"  {f['name']} {f['arguments']}" for f in functions)])


def read_messages(file: Path) -> list[Message]:
    """Reads messages as `/save` writes them, or an object with `messages`. Raises BadCommand for anything else, OSError."""
    try:
        read = json.loads(file.read_text())
    except ValueError as error:
        raise BadCommand(f"{file} is no JSON: {error}") from None
    messages: list[Message] = read["messages"] if isinstance(read, dict) and "messages" in read else read
    try:
        _MESSAGES.validate_python(messages)
    except ValidationError:
        roles = ", ".join(get_args(_Role))
        needs = f"each with a role of {roles}, and calls with the name and the arguments of a function"
        raise BadCommand(f"{file} is no list of messages, {needs}") from None
    return messages
