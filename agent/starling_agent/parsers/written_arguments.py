"""The forms of arguments that are neither a JSON object nor between tags: those of calls in Python, and of Gemma."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from starling_engine.errors import InvalidRequest

from starling_agent.parsers.gemma import QUOTE
from starling_agent.parsers.python_calls import NAME
from starling_agent.parsers.schemas import GrammarSchema, resolved, schema_of, types_of
from starling_agent.parsers.written_calls import Tag, constant, json_string, named, one_of, property_path, sequence

MAX_DEPTH = 3
"""Objects and lists in each other whose form is the schema's; what is deeper is any constant or text."""
ANY_DEPTH = 2
"""Likewise, where the schema does not say what is in them."""
MAX_VALUES = 2_000
"""Values in the form of one tool's arguments; those of all tools of a request have `written_calls.MAX_PARTS`."""
_IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]*"
_WITH_MARKS = ("string", "object", "array")
_CONSTANTS = ("boolean", "null", "number")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Syntax(NamedTuple):
    """Says what stands between arguments, and behind a key; `key` matches what keys can be."""

    separator: str
    equals: str
    key: re.Pattern[str]


PYTHON = Syntax(", ", "=", NAME)
GEMMA = Syntax(",", ":", re.compile(r"[^\s:{}\[\],<]+"))


def python_arguments(schema: Any) -> Tag:
    """Returns the form of `a=1, b="x"`. Values are JSON, but for the names of constants; without a schema they are any text."""
    if isinstance(schema, GrammarSchema):
        return sequence(constant(f"{schema.key}{PYTHON.equals}"), json_string(schema))
    if not isinstance(schema, dict):
        return {"type": "any_text"}
    return _separated(schema, PYTHON, _python_value)


def gemma_arguments(schema: Any) -> Tag:
    """Returns the form of `a:1,b:<|"|>x<|"|>`."""
    forms = _GemmaForms()
    return forms.arguments(schema, 0) if isinstance(schema, dict) else forms.entries(0)


def _separated(schema: dict[str, Any], syntax: Syntax, value: Callable[[Any], Tag]) -> Tag:
    """Returns the form of arguments: those that have to be there in the order of the schema, then any of the others.

    The others may come again, of which the first one counts: to forbid it would take a form for each order.
    """
    properties, required = schema.get("properties"), schema.get("required")
    keys = list(properties) if isinstance(properties, dict) else []
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    for key in needed.intersection(keys):
        if not syntax.key.fullmatch(key):
            raise InvalidRequest(f"the argument {key[:100]!r} cannot be written in this model's format", "tools")
    values = {key: named(value(schema_of(schema, key)), property_path(key)) for key in keys if syntax.key.fullmatch(key)}
    tags = {key: _tag(f"{key}{syntax.equals}", form) for key, form in values.items()}
    first = [tag for key, tag in tags.items() if key in needed]
    others = [tag for key, tag in tags.items() if key not in needed]
    parts = [part for tag in first for part in (constant(syntax.separator), tag)][1:]
    if others:
        some = {"type": "tags_with_separator", "separator": syntax.separator, "tags": others, "at_least_one": bool(first)}
        parts.append(one_of([sequence(constant(syntax.separator), some), constant("")]) if first else some)
    return sequence(*parts) if parts else constant("")


def _tag(begin: str, content: Tag) -> Tag:
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


def _python_value(schema: Any) -> Tag:
    match types_of(schema):
        case kinds if kinds == {"boolean"}:
            return one_of([constant("True"), constant("False")])
        case kinds if kinds == {"null"}:
            return constant("None")
    return {"type": "json_schema", "json_schema": True if schema is None else schema}


class _GemmaForms:
    """Makes the forms of Gemma's values. A schema may refer to itself, so there is a bound of values."""

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def arguments(self, schema: dict[str, Any], depth: int) -> Tag:
        return _separated(schema, GEMMA, lambda value: self._value(value, depth))

    def entries(self, depth: int) -> Tag:
        """Returns the form of entries with any keys and values."""
        return _list_of(sequence({"type": "regex", "pattern": _IDENTIFIER}, constant(":"), self._value(None, depth)))

    def _value(self, schema: Any, depth: int) -> Tag:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(f"a schema has more than {MAX_VALUES} values, more than calls of this format are held to", "tools")
        found = resolved(schema) if depth < MAX_DEPTH else None
        fields = found if isinstance(found, dict) else {}
        choices = fields.get("enum")
        if isinstance(choices, list) and choices and not any(isinstance(choice, dict | list) for choice in choices):
            return one_of([constant(_gemma_constant(choice)) for choice in choices])
        if not types_of(fields):
            depth = max(depth, MAX_DEPTH - ANY_DEPTH)
        kinds = sorted(types_of(fields) or {*_WITH_MARKS[: None if depth < MAX_DEPTH else 1], *_CONSTANTS})
        if len(kinds) == 1:
            return self._kind(kinds[0], fields, depth)
        forms = [self._kind(kind, {}, depth) for kind in _WITH_MARKS if kind in kinds]
        constants = [kind for kind in kinds if kind not in _WITH_MARKS]
        return one_of([*forms, *([{"type": "json_schema", "json_schema": {"type": constants}}] if constants else [])])

    def _kind(self, kind: str, fields: dict[str, Any], depth: int) -> Tag:
        match kind:
            case "string":
                return sequence(constant(QUOTE), {"type": "any_text"}, constant(QUOTE))
            case "object":
                typed = isinstance(fields.get("properties"), dict)
                inner = self.arguments(fields, depth + 1) if typed else self.entries(depth + 1)
                return sequence(constant("{"), inner, constant("}"))
            case "array":
                items = self._value(_with_definitions(fields.get("items"), fields), depth + 1)
                return sequence(constant("["), _list_of(items), constant("]"))
        bounds = {name: fields[name] for name in _BOUNDS if name in fields}
        return {"type": "json_schema", "json_schema": {"type": kind, **bounds}}


def _gemma_constant(value: Any) -> str:
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)


def _list_of(content: Tag) -> Tag:
    return {"type": "tags_with_separator", "separator": ",", "tags": [_tag("", content)]}


def _with_definitions(schema: Any, root: dict[str, Any]) -> Any:
    return schema_of({**root, "properties": {"items": schema}}, "items")
