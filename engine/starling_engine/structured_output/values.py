"""Types and values that a schema leaves: a superset of those that it accepts, found without its other keywords."""

import json
from itertools import pairwise
from typing import Any

from starling_engine.structured_output.document import SchemaDocument
from starling_engine.structured_output.keywords import TYPES, Schema, is_annotation, is_number, named_types
from starling_engine.structured_output.patterns import all_but

MAX_REFERENCES = 20
"""References that are followed one from another, before nothing is said of what they lead to."""
MAX_EXCLUDED_LENGTH = 40
"""Characters of a string that a pattern excludes: it nests a group for each."""


def identity(value: Any) -> str:
    """Returns a text that two values share if JSON Schema calls them equal: 1 is 1.0, but true is not 1."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_whole(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def type_of(value: Any) -> str:
    """Returns the type of a value of JSON; an integer's is number."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def conjuncts(schema: Schema, document: SchemaDocument, followed: int = 0) -> list[dict[str, Any]]:
    """Returns schemas that all have to hold, found through `allOf` and `$ref`; the schema itself is the first."""
    if isinstance(schema, bool):
        return [] if schema else [{"enum": []}]
    return document.remember("conjuncts", schema, lambda: _conjuncts(document.modern(schema), document, followed))


def _conjuncts(schema: dict[str, Any], document: SchemaDocument, followed: int) -> list[dict[str, Any]]:
    found = [schema]
    for part in schema.get("allOf", []):
        found += conjuncts(part, document, followed)
    if "$ref" in schema and followed < MAX_REFERENCES:
        found += conjuncts(document.resolve(schema["$ref"], schema), document, followed + 1)
    return found


def possible_values(schema: Schema, document: SchemaDocument, depth: int = 0) -> list[Any] | None:
    """Returns a finite list of values without which the schema accepts none, or None if there is no such list."""
    return document.remember("values", schema, lambda: _possible_values(schema, document, depth))


def _possible_values(schema: Schema, document: SchemaDocument, depth: int) -> list[Any] | None:
    parts = conjuncts(schema, document)
    lists = [values for part in parts if (values := _listed(part, document, depth)) is not None]
    if not lists:
        return None
    types = possible_types(schema, document, depth)
    return list({identity(value): value for value in min(lists, key=len) if type_of(value) in types}.values())


def possible_types(schema: Schema, document: SchemaDocument, depth: int = 0) -> frozenset[str]:
    """Returns the types of all values that the schema accepts, and perhaps others."""
    return document.remember("types", schema, lambda: _possible_types(schema, document, depth))


def _possible_types(schema: Schema, document: SchemaDocument, depth: int) -> frozenset[str]:
    types = frozenset(TYPES)
    for part in conjuncts(schema, document):
        types &= {"number" if name == "integer" else name for name in named_types(part)}
        if "const" in part:
            types &= {type_of(part["const"])}
        if "enum" in part:
            types &= {type_of(value) for value in part["enum"]}
        for branches in _choices(part, depth):
            types &= frozenset().union(*(possible_types(branch, document, depth + 1) for branch in branches))
    return types


def _listed(part: dict[str, Any], document: SchemaDocument, depth: int) -> list[Any] | None:
    if "const" in part:
        return [part["const"]]
    if "enum" in part:
        return list(part["enum"])
    simple: dict[str, list[Any]] = {"null": [None], "boolean": [False, True]}
    if "type" in part and set(named_types(part)) <= simple.keys():
        return [value for name in named_types(part) for value in simple[name]]
    for branches in _choices(part, depth):
        lists = [possible_values(branch, document, depth + 1) for branch in branches]
        if all(values is not None for values in lists):
            return [value for values in lists for value in values or ()]
    return None


def _choices(part: dict[str, Any], depth: int) -> list[list[Schema]]:
    """Lists of schemas of which one has to hold; none so deep that they may lead back to themselves."""
    return [part[keyword] for keyword in ("anyOf", "oneOf") if keyword in part and depth < MAX_REFERENCES]


def listed_strings(schema: Schema, document: SchemaDocument) -> list[str] | None:
    """Returns the strings that the schema accepts if it does nothing but list them, else None."""
    for _ in range(MAX_REFERENCES):
        if isinstance(schema, bool):
            return None
        schema = document.modern(schema)
        keywords = {keyword for keyword in schema if not is_annotation(keyword)}
        if keywords == {"$ref"}:
            schema = document.resolve(schema["$ref"], schema)
        elif keywords <= {"type", "const", "enum"} and keywords & {"const", "enum"}:
            values = possible_values(schema, document) or []
            return [value for value in values if isinstance(value, str)]
        else:
            return None
    return None


def other_values(values: list[Any]) -> Schema | None:
    """Returns a schema for all values but these, or None where arrays, objects or long strings are among them."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    if by_type.keys() & {"array", "object"} or any(len(word) > MAX_EXCLUDED_LENGTH for word in by_type.get("string", [])):
        return None
    branches: list[Schema] = [{"type": [name for name in TYPES if name not in by_type]}]
    if len(set(by_type.get("boolean", []))) == 1:
        branches.append({"const": not by_type["boolean"][0]})
    if "number" in by_type:
        branches += _numbers_between(sorted(set(by_type["number"])))
    if "string" in by_type:
        branches.append({"type": "string", "pattern": all_but(by_type["string"])})
    return {"anyOf": branches}


def _numbers_between(numbers: list[Any]) -> list[Schema]:
    below: Schema = {"type": "number", "exclusiveMaximum": numbers[0]}
    above: Schema = {"type": "number", "exclusiveMinimum": numbers[-1]}
    between: list[Schema] = [
        {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
    ]
    return [below, *between, above]
