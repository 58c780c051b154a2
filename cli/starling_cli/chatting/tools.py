"""The tools of a file: what the server gets, and the programs that carry calls out here."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

NonEmpty = Annotated[str, Field(min_length=1)]


class BadTools(ValueError):
    """A file of tools that cannot be used; the message says where."""


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: NonEmpty


class _Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: _Function
    command: Annotated[list[NonEmpty], Field(min_length=1)] | None = None


@dataclass(frozen=True)
class Tools:
    """`specs` are `tools` as the server gets them; `commands` the programs of those that have one, by the tool's name."""

    specs: list[dict[str, Any]]
    commands: dict[str, list[str]]


_LIST = TypeAdapter(list[_Tool])


def read_tools(path: Path) -> Tools:
    """Reads OpenAI's `tools`, the list or an object with it. Beside `function` an entry may have a `command`. Raises BadTools."""
    try:
        read = json.loads(path.read_text())
        tools = _LIST.validate_python(read["tools"] if isinstance(read, dict) and "tools" in read else read)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadTools(f"{path}: {_path(first['loc'])}{first['msg']}") from None
    except (OSError, ValueError) as error:
        raise BadTools(f"{path} cannot be read: {error}") from None
    names = [tool.function.name for tool in tools]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise BadTools(f"{path}: several tools have the name {min(repeated)!r}")
    return Tools(
        [tool.model_dump(exclude={"command"}) for tool in tools],
        {tool.function.name: tool.command for tool in tools if tool.command is not None},
    )


def _path(location: tuple[int | str, ...]) -> str:
    return f"tools{''.join(f'[{part}]' if isinstance(part, int) else f'.{part}' for part in location)}: "
