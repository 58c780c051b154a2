"""The tools that a request offers, and which of them the model may or has to call."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from starling_engine.errors import InvalidRequest
from starling_engine.params import fault_of_size

from starling_agent.openai.custom_tools import input_schema
from starling_agent.openai.protocol.base import refuse_unknown, shown
from starling_agent.openai.protocol.structured_outputs import Form
from starling_agent.parsers.reading import Family
from starling_agent.parsers.schemas import GrammarSchema

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
KINDS: Mapping[str, Collection[str]] = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
"""Kinds of tools, and the fields of each, which a tool has in an object under the name of its kind."""


class OfferedTool(NamedTuple):
    """A tool of a request.

    function   the tool as chat templates get it, without its type
    path       the request's name of its schema
    is_custom  its calls are texts
    is_strict  its arguments have to fit its schema
    """

    function: dict[str, Any]
    path: str
    is_custom: bool
    is_strict: bool

    @property
    def name(self) -> str:
        name: str = self.function["name"]
        return name

    @property
    def schema(self) -> Any:
        return self.function.get("parameters")


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a request, in its order.

    choice   auto, required, or the name of the only tool that may be called
    allowed  the names of those that may be called; None: all
    """

    tools: Sequence[OfferedTool]
    choice: str = "auto"
    allowed: frozenset[str] | None = None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools as chat templates get them."""
        return [{"type": "function", "function": tool.function} for tool in self.tools]

    @property
    def schemas(self) -> Mapping[str, Any]:
        """The schema of each tool's arguments, by its name."""
        return {tool.name: tool.schema for tool in self.tools}

    @property
    def custom(self) -> frozenset[str]:
        """The names of custom tools."""
        return frozenset(tool.name for tool in self.tools if tool.is_custom)

    @property
    def callable(self) -> list[OfferedTool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.allowed is None or tool.name in self.allowed]

    def without_grammars(self) -> Self:
        """Returns the tools with grammars that the model is shown, and not held to."""
        tools = [
            tool._replace(function={**tool.function, "parameters": dict(tool.schema)}, is_strict=False)
            if isinstance(tool.schema, GrammarSchema)
            else tool
            for tool in self.tools
        ]
        return replace(self, tools=tools)


def offered_tools(tools: list[Any] | None, choice: Any, param: str = "tools") -> OfferedTools | None:
    """Checks `tools` and `tool_choice`; None where nothing is to be called. Raises InvalidRequest with the path of the fault."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools, got {len(tools)}", param)
    offered = [_tool(tool, f"{param}[{i}]") for i, tool in enumerate(tools)]
    kinds: dict[str, str] = {}
    for i, tool in enumerate(offered):
        kind = "custom" if tool.is_custom else "function"
        if tool.name in kinds:
            raise InvalidRequest(f"there is another tool of the name {tool.name}", f"{param}[{i}].{kind}.name")
        kinds[tool.name] = kind
    chosen, allowed = _choice(choice, kinds)
    return None if chosen == "none" else OfferedTools(offered, chosen, allowed)


def calls_form(tools: OfferedTools, family: Family, *, parallel: bool) -> Form | None:
    """Returns the form of outputs that have to call a tool, or whose calls have to be of allowed tools or fit strict schemas.

    None where none of it is asked, and where strict schemas cannot be enforced among text: clients ask for them whatever the model.
    Raises InvalidRequest for the others where the format has no grammar, as one that a checkpoint describes.
    """
    if (tool := _with_loose_grammar(tools, family)) is not None:
        why = f"a grammar cannot be enforced in the format {family.name}; leave it out"
        if tools.choice == "auto" and _holds(family, tool.schema):
            why = f"a grammar cannot be enforced among text in the format {family.name}; leave it out or force calls"
        raise InvalidRequest(why, tool.path)
    written = family.written
    schemas, paths = {tool.name: tool.schema for tool in tools.callable}, {tool.name: tool.path for tool in tools.tools}
    if tools.choice == "auto":
        if tools.allowed is None and not any(tool.is_strict for tool in tools.tools):
            return None
        loose = {tool.name: tool.schema if tool.is_strict else None for tool in tools.callable}
        tag = written.possible(loose, paths=paths) if written is not None else None
        if tag is None and tools.allowed is not None:
            why = f"which tools are called cannot be enforced among text in the format {family.name}; leave the others out of tools"
            raise InvalidRequest(why, "tool_choice")
        return None if tag is None else Form("tools", "structural_tag", tag)
    if written is None:
        raise InvalidRequest(f"calls cannot be enforced in the format of {family.name}; possible: auto, none", "tool_choice")
    parallel = parallel and tools.choice == "required"
    return Form("tools", "structural_tag", written.required(schemas, parallel=parallel, paths=paths))


def with_enforced_grammars(tools: OfferedTools, family: Family, *, has_form: bool) -> OfferedTools:
    """Returns the tools without grammars where the format cannot enforce them; `has_form`: nor can it beside the answer's own."""
    loose = has_form or _with_loose_grammar(tools, family) is not None
    return tools.without_grammars() if loose else tools


def _with_loose_grammar(tools: OfferedTools, family: Family) -> OfferedTool | None:
    """Returns a tool that may be called, and whose grammar the format cannot enforce, if there is one."""
    is_forced = tools.choice != "auto"
    can = is_forced or (family.written is not None and family.written.marks_calls)
    grammars = (tool for tool in tools.callable if isinstance(tool.schema, GrammarSchema))
    return next((tool for tool in grammars if not (can and _holds(family, tool.schema))), None)


def _holds(family: Family, schema: GrammarSchema) -> bool:
    return family.written is not None and family.written.holds(schema)


def _tool(tool: object, param: str) -> OfferedTool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"a tool must be an object, got {shown(tool)}", param)
    kind = tool.get("type", "function")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRequest(f"must be {' or '.join(KINDS)}, got {shown(kind)}", f"{param}.type")
    refuse_unknown(tool, {"type", kind}, param)
    fields, where = tool.get(kind), f"{param}.{kind}"
    if not isinstance(fields, dict):
        raise InvalidRequest(f"must be an object with the tool's name, got {shown(fields)}", where)
    refuse_unknown(fields, KINDS[kind], where)
    checked_name(fields.get("name"), f"{where}.name")
    if not isinstance(fields.get("description"), str | None):
        raise InvalidRequest(f"must be a text, got {shown(fields['description'])}", f"{where}.description")
    return _custom(fields, where) if kind == "custom" else _function(fields, where)


def _custom(fields: dict[str, Any], param: str) -> OfferedTool:
    schema = input_schema(fields.get("format"), f"{param}.format")
    is_grammar = isinstance(schema, GrammarSchema)
    if (fault := fault_of_size(schema)) is not None:
        raise InvalidRequest(fault, schema.param if isinstance(schema, GrammarSchema) else param)
    described = {name: fields[name] for name in ("name", "description") if fields.get(name) is not None}
    return OfferedTool({**described, "parameters": schema}, f"{param}.format", is_custom=True, is_strict=is_grammar)


def _function(fields: dict[str, Any], param: str) -> OfferedTool:
    if not isinstance(fields.get("strict"), bool | None):
        raise InvalidRequest(f"must be true or false, got {shown(fields['strict'])}", f"{param}.strict")
    parameters, path = fields.get("parameters"), f"{param}.parameters"
    if not isinstance(parameters, dict | None):
        raise InvalidRequest(f"must be a JSON schema of an object, got {shown(parameters)}", path)
    if parameters is not None and (fault := fault_of_size(parameters)) is not None:
        raise InvalidRequest(fault, path)
    kind = None if parameters is None else parameters.get("type")
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"must be a JSON schema of an object, got the type {shown(kind)}", path)
    function = {name: value for name, value in fields.items() if name != "strict" and value is not None}
    return OfferedTool(function, path, is_custom=False, is_strict=bool(fields.get("strict")))


def check_callers(tool: Mapping[str, Any], param: str) -> None:
    """Raises InvalidRequest for a tool that the model may not call itself."""
    callers = tool.get("allowed_callers")
    if callers is not None and not (isinstance(callers, list) and "direct" in callers):
        why = f"must have direct: no code runs here that could call it, got {shown(callers)}"
        raise InvalidRequest(why, f"{param}.allowed_callers")


def checked_name(name: object, param: str) -> str:
    """Returns the name of a tool, or of a namespace of tools. Raises InvalidRequest for one that is not possible."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"must have 1 to 128 letters, digits, _, . and -, got {shown(name)}", param)
    return name


def _choice(choice: Any, kinds: Mapping[str, str]) -> tuple[str, frozenset[str] | None]:
    """Returns none, auto, required, or a tool's name; and the tools that may be called, None for all.

    `kinds` has the tools' kinds by their names.
    """
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidRequest(f"must be none, auto, required, or an object, got {shown(choice)}", "tool_choice")
        return choice, None
    match choice:
        case {"type": "function" | "custom"}:
            name = _chosen(choice, kinds, "tool_choice")
            return name, frozenset((name,))
        case {"type": "allowed_tools"}:
            refuse_unknown(choice, {"type", "allowed_tools"}, "tool_choice")
            return _allowed(choice.get("allowed_tools"), kinds, "tool_choice.allowed_tools")
    possible = "none, auto, required, or an object that names a function, a custom tool or allowed_tools"
    raise InvalidRequest(f"must be {possible}, got {shown(choice)}", "tool_choice")


def _allowed(allowed: object, kinds: Mapping[str, str], param: str) -> tuple[str, frozenset[str]]:
    if not isinstance(allowed, dict):
        raise InvalidRequest(f"must be an object with mode and tools, got {shown(allowed)}", param)
    refuse_unknown(allowed, {"mode", "tools"}, param)
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"must be auto or required, got {shown(mode)}", f"{param}.mode")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequest(f"must be a list of at least one tool, got {shown(tools)}", f"{param}.tools")
    return mode, frozenset(_chosen(tool, kinds, f"{param}.tools[{i}]") for i, tool in enumerate(tools))


def _chosen(tool: object, kinds: Mapping[str, str], param: str) -> str:
    """Returns the name of a tool in `tool_choice`."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRequest(f"must be an object that names a function or a custom tool, got {shown(tool)}", param)
    refuse_unknown(tool, {"type", kind}, param)
    named = tool.get(kind)
    name = named.get("name") if isinstance(named, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise InvalidRequest(f"must be one of the tools' names, got {shown(name)}", f"{param}.{kind}.name")
    if kinds[name] != kind:
        raise InvalidRequest(f"the tool {name} is of the type {kinds[name]}, got {shown(kind)}", f"{param}.type")
    return name
