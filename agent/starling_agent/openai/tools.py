"""The tools that a request offers, and which of them the model may or has to call."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.params import fault_of_size

from starling_agent.openai.protocol.base import shown
from starling_agent.openai.protocol.structured_outputs import Form
from starling_agent.parsers.reading import Family

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_TOOL_FIELDS = {"type", "function"}
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a request.

    functions  the tools as chat templates get them, in the request's order
    choice     auto, required, or the name of the only tool that may be called
    strict     the names of those whose arguments have to fit their schemas
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    strict: frozenset[str] = field(default_factory=frozenset)

    @property
    def schemas(self) -> Mapping[str, Any]:
        """The schema of each tool's arguments, by its name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.functions}


def offered_tools(tools: list[Any] | None, choice: Any, param: str = "tools") -> OfferedTools | None:
    """Checks `tools` and `tool_choice`; None where nothing is to be called. Raises InvalidRequest with the path of the fault."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, got {len(tools)}", param)
    functions = [_function(tool, f"{param}[{i}]") for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in functions]
    seen: set[str] = set()
    for i, name in enumerate(names):
        if name in seen:
            raise InvalidRequest(f"there is another tool of the name {name}", f"{param}[{i}].function.name")
        seen.add(name)
    strict = frozenset(tool["function"]["name"] for tool in functions if tool["function"].pop("strict", None))
    chosen = _choice(choice, names)
    return None if chosen == "none" else OfferedTools(functions, chosen, strict=strict)


def calls_form(tools: OfferedTools, family: Family, *, parallel: bool, may_reason: bool) -> Form | None:
    """Returns the form of outputs that have to call a tool, or whose calls have to fit strict schemas.

    None where neither is asked, and where strict schemas cannot be enforced among text: clients ask for them whatever the model.
    Raises InvalidRequest where a call is required, and the model's format has no grammar.
    """
    if tools.choice == "auto":
        schemas = {name: schema if name in tools.strict else None for name, schema in tools.schemas.items()}
        tag = family.written.possible(schemas) if family.written is not None and tools.strict else None
        return None if tag is None else Form("tools", "structural_tag", tag, may_reason)
    if family.written is None:
        raise InvalidRequest(f"calls in the format {family.name} cannot be enforced yet; possible: auto, none", "tool_choice")
    named = tools.choice != "required"
    schemas = {tools.choice: tools.schemas[tools.choice]} if named else dict(tools.schemas)
    return Form("tools", "structural_tag", family.written.required(schemas, parallel=parallel and not named), may_reason)


def _function(tool: object, param: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"a tool must be an object, got {shown(tool)}", param)
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"only functions can be called, got {shown(tool.get('type'))}", f"{param}.type")
    _refuse_unknown(tool, _TOOL_FIELDS, param)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"must be an object with the function's name, got {shown(function)}", f"{param}.function")
    where = f"{param}.function"
    _refuse_unknown(function, _FUNCTION_FIELDS, where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"must have 1 to 128 letters, digits, _, . and -, got {shown(name)}", f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequest(f"must be a text, got {shown(function['description'])}", f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequest(f"must be true or false, got {shown(function['strict'])}", f"{where}.strict")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise InvalidRequest(f"must be a JSON schema of an object, got {shown(parameters)}", f"{where}.parameters")
    if parameters is not None and (fault := fault_of_size(parameters)) is not None:
        raise InvalidRequest(fault, f"{where}.parameters")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: Any, names: list[str]) -> str:
    """Returns none, auto, required, or a tool's name."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidRequest(f"must be none, auto, required, or an object, got {shown(choice)}", "tool_choice")
        return choice
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise InvalidRequest(
            f"must be none, auto, required, or an object that names a function, got {shown(choice)}", "tool_choice"
        )
    _refuse_unknown(choice, _TOOL_FIELDS, "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise InvalidRequest(f"must be one of the tools' names, got {shown(name)}", "tool_choice.function.name")
    return str(name)


def _refuse_unknown(value: dict[str, Any], known: set[str], param: str) -> None:
    for name in value.keys() - known:
        raise InvalidRequest(f"unknown field {shown(name)}", f"{param}.{name}")
