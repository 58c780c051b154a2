"""Keywords of older drafts and of OpenAPI 3.0, in the words of JSON Schema 2020-12."""

from typing import Any

from starling_engine.structured_output.keywords import Schema, named_types


def modern(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema itself if its keywords are those of 2020-12, else a copy of which they are. Shapes are checked before."""
    for rename in (_nullable, _exclusive_bounds, _items_by_position, _dependencies):
        schema = rename(schema)
    return schema


def _without(schema: dict[str, Any], *keywords: str) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword not in keywords}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0: null is a value too. With `enum`, only if that lists it, as the specification says."""
    if "nullable" not in schema:
        return schema
    rest = _without(schema, "nullable")
    if not schema["nullable"]:
        return rest
    if "type" in schema:
        return {**rest, "type": [*named_types(schema), "null"]}
    return {"anyOf": [rest, {"type": "null"}]}


def _exclusive_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Draft 4: true makes the bound beside it exclusive."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = schema.get(exclusive)
        if not isinstance(flag, bool):
            continue
        rest = _without(schema, exclusive)
        schema = {**_without(rest, bound), exclusive: schema[bound]} if flag and bound in schema else rest
    return schema


def _items_by_position(schema: dict[str, Any]) -> dict[str, Any]:
    """Drafts before 2020-12: a list of `items`, and `additionalItems` for those behind it."""
    if not isinstance(schema.get("items"), list):
        return schema
    rest = _without(schema, "items", "additionalItems")
    prefix: list[Schema] = schema["items"]
    listed = {"prefixItems": prefix} if prefix else {}
    return {**rest, **listed, **({"items": schema["additionalItems"]} if "additionalItems" in schema else {})}


def _dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """Drafts before 2019-09: names or a schema, under one keyword."""
    if "dependencies" not in schema:
        return schema
    names = {name: value for name, value in schema["dependencies"].items() if isinstance(value, list)}
    schemas = {name: value for name, value in schema["dependencies"].items() if not isinstance(value, list)}
    rest = _without(schema, "dependencies")
    parts = [{"dependentRequired": names}, {"dependentSchemas": schemas}]
    return {**rest, "allOf": [*rest.get("allOf", []), *parts]}
