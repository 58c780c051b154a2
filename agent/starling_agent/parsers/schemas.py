"""Reads from a tool's schema what its arguments may be, for formats that write them as text."""

import json
from typing import Any

from starling_agent.parsers.json_text import literal

_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
MAX_SCHEMAS = 64
"""Alternatives and references of one argument that are looked at: schemas may refer to themselves."""


class GrammarSchema(dict[str, Any]):
    """The schema of arguments that are one text, in the language of a Lark grammar, which a schema cannot say.

    key      the name of the argument
    grammar  the text of the grammar
    param    the request's field that has it
    """

    def __init__(self, key: str, grammar: str, param: str, description: str) -> None:
        super().__init__(type="object", properties={key: {"type": "string", "description": description}}, required=[key])
        self.key = key
        self.grammar = grammar
        self.param = param


def schema_of(parameters: Any, key: str) -> Any:
    """Returns the schema of an argument; None where nothing is known."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schema = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(schema, dict) and isinstance(parameters, dict):
        definitions = {name: parameters[name] for name in ("$defs", "definitions") if name in parameters}
        return {**definitions, **schema}
    return schema


def resolved(schema: Any) -> Any:
    """Returns the schema that a reference leads to, with its definitions; others as they are."""
    for _ in range(MAX_SCHEMAS):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        found = _referred(reference, schema) if isinstance(reference, str) else None
        if not isinstance(found, dict):
            break
        schema = {**{name: schema[name] for name in ("$defs", "definitions") if name in schema}, **found}
    return schema


def is_text(schema: Any) -> bool:
    """Says if an argument is text whatever it looks like."""
    return types_of(schema) == {"string"}


def json_value(text: str, schema: Any) -> str:
    """Returns the JSON of a value that was written as text.

    What is JSON of a type that the schema allows stays as it is, Python's constants become JSON's, and the rest is text.
    """
    stripped = text.strip()
    types = types_of(schema)
    constant = literal(stripped)
    try:
        value = json.loads(stripped if constant is None else constant, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) and (not types or "string" in types):
        return json.dumps(text, ensure_ascii=False)  # quotes and all
    if types and not _fits(value, types):
        return json.dumps(text, ensure_ascii=False)
    return stripped if constant is None else constant


def _fits(value: Any, types: set[str]) -> bool:
    kind = "null" if value is None else _TYPES[type(value)]
    # A number where text is not possible is better than text.
    return kind in types or (kind in ("integer", "number") and bool(types & {"integer", "number"})) or "string" not in types


def types_of(schema: Any) -> set[str]:
    """Returns the types that a schema allows; none if it does not say."""
    types: set[str] = set()
    waiting, seen = [schema], set[str]()
    for _ in range(MAX_SCHEMAS):
        if not waiting:
            break
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        kinds = [one["type"]] if isinstance(one.get("type"), str) else _list(one.get("type"))
        types.update(kind for kind in kinds if isinstance(kind, str))
        if not kinds:
            values = [*_list(one.get("enum")), *([one["const"]] if "const" in one else [])]
            types.update("null" if value is None else _TYPES.get(type(value), "string") for value in values[:MAX_SCHEMAS])
        for name in ("anyOf", "oneOf", "allOf"):
            waiting += _list(one.get(name))[:MAX_SCHEMAS]
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append(_referred(reference, schema))
    return types


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
