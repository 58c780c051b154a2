"""Keywords of arrays that the library lacks, said by those that it has: only arrays of bounded length allow that."""

from typing import Any

from starling_engine.structured_output.document import SchemaDocument
from starling_engine.structured_output.keywords import TYPES, Schema, named_types
from starling_engine.structured_output.values import identity, possible_values

MAX_ARRAYS = 400
"""Arrays that are listed for `uniqueItems`: five values in any order and number make 326."""
MAX_POSITIONS = 16
"""Positions at which the item may stand that `contains` asks for."""


def contained(schema: dict[str, Any], document: SchemaDocument, origin: Any) -> Schema:
    """Returns what says `contains`: the item stands at the first position, or the second, and so on to the last possible."""
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    item = schema["contains"]
    if item in (True, {}):
        return {"minItems": least, **({} if most is None else {"maxItems": most})}
    if least == 0 and most is None:
        return True
    longest = schema.get("maxItems", MAX_POSITIONS + 1)
    if least != 1 or most is not None or longest > MAX_POSITIONS:
        reason = f"contains is possible alone, with a maxItems of {MAX_POSITIONS} at most; or else use prefixItems or items"
        raise document.refusal(origin, "contains", reason)
    others: Schema = {"type": [name for name in TYPES if name != "array"]}
    placed: list[Schema] = [
        {"type": "array", "minItems": at + 1, "prefixItems": [*[True] * at, item]} for at in range(int(longest))
    ]
    return {"anyOf": [others, *placed]} if named_types(schema) != ["array"] else {"anyOf": placed} if placed else False


def with_evaluated_items(schema: dict[str, Any], document: SchemaDocument, origin: Any) -> dict[str, Any]:
    """Returns the schema with what says `unevaluatedItems`, where it is certain which items were evaluated."""
    unevaluated = schema["unevaluatedItems"]
    rest = {keyword: value for keyword, value in schema.items() if keyword != "unevaluatedItems"}
    if unevaluated in (True, {}) or "items" in rest:
        return rest
    if {"allOf", "anyOf", "oneOf", "if", "$ref", "contains", "dependentSchemas"} & rest.keys():
        reason = "unevaluatedItems is possible beside prefixItems alone; use items"
        raise document.refusal(origin, "unevaluatedItems", reason)
    return {**rest, "items": unevaluated}


def unique(schema: dict[str, Any], document: SchemaDocument, origin: Any) -> Schema:
    """Returns what says `uniqueItems`: all arrays of different values, listed."""
    if not schema["uniqueItems"] or schema.get("maxItems", 2) <= 1:
        return True
    if named_types(schema) != ["array"]:
        return {"anyOf": [{"type": [name for name in TYPES if name != "array"]}, {**schema, "type": "array"}]}
    return {"enum": _Enumeration(schema, document, origin).arrays()}


class _Enumeration:
    """Arrays without equal items, listed depth first; more than `MAX_ARRAYS`, or endless values, are refused."""

    def __init__(self, schema: dict[str, Any], document: SchemaDocument, origin: Any) -> None:
        self._prefix: list[Schema] = schema.get("prefixItems", [])
        self._rest: Schema = schema.get("items", True)
        self._least: int = schema.get("minItems", 0)
        self._most: int = schema.get("maxItems", MAX_ARRAYS)
        self._document = document
        self._origin = origin
        self._found: list[list[Any]] = []

    def arrays(self) -> list[list[Any]]:
        """Returns them; arrays that are too short are left out."""
        self._extend([], set())
        return self._found

    def _extend(self, array: list[Any], taken: set[str]) -> None:
        if len(array) >= self._least:
            self._found.append(array)
        self._document.spend()
        if len(self._found) > MAX_ARRAYS:
            raise self._refusal()
        if len(array) == self._most:
            return
        position = self._prefix[len(array)] if len(array) < len(self._prefix) else self._rest
        values = possible_values(position, self._document) if position is not False else []
        if values is None:
            raise self._refusal()
        for value in values:
            if identity(value) not in taken:
                self._extend([*array, value], {*taken, identity(value)})

    def _refusal(self) -> Exception:
        reason = "uniqueItems is possible for items of an enum with up to five values; remove it, or list the arrays in an enum"
        return self._document.refusal(self._origin, "uniqueItems", reason)
