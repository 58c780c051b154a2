"""Reads from a tool's schema what its arguments may be, for formats that write them as text."""

import json
from collections.abc import Iterator
from typing import Any

from starling_agent.parsers.json_text import literal

_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_DEPTH = 8
"""Levels of references and alternatives that are followed."""


def schema_of(parameters: Any, key: str) -> Any:
    """Returns the schema of an argument; None where nothing is known."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(schema, dict) and isinstance(parameters, dict):
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        return {**definitions, **schema}
    return schema


def is_text(schema: Any) -> bool:
    """Says if an argument is text whatever it looks like."""
    return set(_types(schema, schema, _DEPTH)) == {"string"}


def json_value(text: str, schema: Any) -> str:
    """Returns the JSON of a value that was written as text.

    What is JSON of a type that the schema allows stays as it is, Python's constants become JSON's, and the rest is text.
    """
    stripped = text.strip()
    types = set(_types(schema, schema, _DEPTH))
    constant = literal(stripped)
    try:
        value = json.loads(stripped if constant is None else constant, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) and not types:
        return json.dumps(text, ensure_ascii=False)
    if types and not _fits(value, types):
        return json.dumps(text, ensure_ascii=False)
    return stripped if constant is None else constant


def _fits(value: Any, types: set[str]) -> bool:
    kind = "null" if value is None else _TYPES[type(value)]
    # A number where text is not possible is better than text.
    return kind in types or (kind in ("integer", "number") and bool(types & {"integer", "number"})) or "string" not in types


def _types(schema: Any, root: Any, depth: int) -> Iterator[str]:
    """Yields the types that a schema allows; nothing if it does not say."""
    if not isinstance(schema, dict) or depth == 0:
        return
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (one for one in kind if isinstance(one, str))
    for name in ("anyOf", "oneOf", "allOf"):
        for one in _list(schema.get(name)):
            yield from _types(one, root, depth - 1)
    if kind is None:
        for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
            yield "null" if value is None else _TYPES.get(type(value), "string")
    if isinstance(schema.get("$ref"), str):
        yield from _types(_referred(schema["$ref"], root), root, depth - 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Any) -> Any:
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        root = root.get(part) if isinstance(root, dict) else None
    return root


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
