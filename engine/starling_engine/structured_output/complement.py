"""Schemas for all values that another schema refuses, keyword by keyword: a value is refused if any keyword refuses it."""

from collections.abc import Callable
from typing import Any

from starling_engine.structured_output.disjoint import are_disjoint
from starling_engine.structured_output.document import SchemaDocument
from starling_engine.structured_output.keywords import TYPES, Schema, is_annotation, named_types
from starling_engine.structured_output.values import MAX_REFERENCES, other_values


class NoComplement(ValueError):
    """The complement of a keyword cannot be said in other keywords; the message names it."""


def complement(schema: Schema, document: SchemaDocument, followed: int = 0) -> Schema:
    """Returns the schema of exactly the values that this one refuses. Raises `NoComplement`."""
    document.spend()
    if isinstance(schema, bool):
        return not schema
    schema = document.modern(schema)
    if "$ref" in schema and followed >= MAX_REFERENCES:
        raise NoComplement("$ref, which leads back here")
    branches = [
        _complement_of(keyword, schema, document, followed)
        for keyword in schema
        if not is_annotation(keyword) and keyword != "discriminator"
    ]
    return any_of(branches)


def any_of(branches: list[Schema]) -> Schema:
    """Returns a schema for what any of the branches accepts: none of them, nothing."""
    if True in branches:
        return True
    possible = [branch for branch in branches if branch is not False]
    if len(possible) == 1:
        return possible[0]
    return {"anyOf": possible} if possible else False


def _complement_of(keyword: str, schema: dict[str, Any], document: SchemaDocument, followed: int) -> Schema:
    """The schema of what one keyword refuses, given those beside it."""
    value = schema[keyword]

    def without(part: Schema) -> Schema:
        return complement(part, document, followed)

    if keyword == "$ref":
        return complement(document.resolve(value, schema), document, followed + 1)
    if keyword == "oneOf" and not _are_pairwise_disjoint(value, document):
        raise NoComplement("oneOf, whose branches may overlap")
    if keyword in ("items", "additionalProperties"):
        return _without_rest(keyword, schema)
    if keyword not in _COMPLEMENTS:
        raise NoComplement(keyword)
    return _COMPLEMENTS[keyword](value, without)


def _are_pairwise_disjoint(branches: list[Schema], document: SchemaDocument) -> bool:
    return all(are_disjoint(one, other, document) for at, one in enumerate(branches) for other in branches[:at])


def _without_rest(keyword: str, schema: dict[str, Any]) -> Schema:
    """Says what `items` or `additionalProperties` refuses, which lies somewhere behind what is listed."""
    rest = schema[keyword]
    if rest in (True, {}):
        return False
    if keyword == "items" and rest is False:
        return {"type": "array", "minItems": len(schema.get("prefixItems", [])) + 1}
    raise NoComplement(keyword)


def _without_type(value: Any, _: Callable[[Schema], Schema]) -> Schema:
    named = set(named_types({"type": value}))
    if "integer" in named and "number" not in named:
        raise NoComplement("type: integer")
    others = [name for name in TYPES if name not in named]
    return {"type": others} if others else False


def _without_values(values: list[Any], _: Callable[[Schema], Schema]) -> Schema:
    others = other_values(values)
    if others is None:
        raise NoComplement("const or enum with an array, an object or a long string")
    return others


def _without_required(names: list[str], _: Callable[[Schema], Schema]) -> Schema:
    return any_of([{"type": "object", "properties": {name: False}} for name in names])


def _without_properties(properties: dict[str, Schema], without: Callable[[Schema], Schema]) -> Schema:
    others = {name: without(schema) for name, schema in properties.items()}
    return any_of(
        [
            {"type": "object", "required": [name], "properties": {name: other}}
            for name, other in others.items()
            if other is not False
        ]
    )


def _without_prefix(prefix: list[Schema], without: Callable[[Schema], Schema]) -> Schema:
    others = [without(schema) for schema in prefix]
    return any_of(
        [
            {"type": "array", "minItems": at + 1, "prefixItems": [*[True] * at, other]}
            for at, other in enumerate(others)
            if other is not False
        ]
    )


def _at_most(name: str, keyword: str) -> Callable[[int, Any], Schema]:
    return lambda least, _: {"type": name, keyword: int(least) - 1} if least else False


def _at_least(name: str, keyword: str) -> Callable[[int, Any], Schema]:
    return lambda most, _: {"type": name, keyword: int(most) + 1}


def _numbers(keyword: str) -> Callable[[float, Any], Schema]:
    return lambda bound, _: {"type": "number", keyword: bound}


_COMPLEMENTS: dict[str, Callable[[Any, Callable[[Schema], Schema]], Schema]] = {
    "type": _without_type,
    "const": lambda value, without: _without_values([value], without),
    "enum": _without_values,
    "minLength": _at_most("string", "maxLength"),
    "maxLength": _at_least("string", "minLength"),
    "minItems": _at_most("array", "maxItems"),
    "maxItems": _at_least("array", "minItems"),
    "minProperties": _at_most("object", "maxProperties"),
    "maxProperties": _at_least("object", "minProperties"),
    "minimum": _numbers("exclusiveMaximum"),
    "exclusiveMinimum": _numbers("maximum"),
    "maximum": _numbers("exclusiveMinimum"),
    "exclusiveMaximum": _numbers("minimum"),
    "required": _without_required,
    "properties": _without_properties,
    "prefixItems": _without_prefix,
    "allOf": lambda parts, without: any_of([without(part) for part in parts]),
    "anyOf": lambda parts, without: {"allOf": [without(part) for part in parts]},
    "oneOf": lambda parts, without: {"allOf": [without(part) for part in parts]},
    "not": lambda part, _: part,
}
