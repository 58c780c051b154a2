"""Proofs that two schemas accept no value in common: then exactly one of them (`oneOf`) is any of them (`anyOf`)."""

from itertools import product
from typing import Any

from starling_engine.structured_output.document import SchemaDocument
from starling_engine.structured_output.keywords import Schema, is_number
from starling_engine.structured_output.values import conjuncts, identity, possible_types, possible_values

MAX_DEPTH = 10
"""Objects in objects that are compared; deeper ones count as not disjoint."""
_Parts = list[dict[str, Any]]
_BOUNDS = {
    "string": (("minLength",), ("maxLength",)),
    "array": (("minItems",), ("maxItems",)),
    "object": (("minProperties",), ("maxProperties",)),
    "number": (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")),
}


def are_disjoint(left: Schema, right: Schema, document: SchemaDocument, depth: int = 0) -> bool:
    """Returns whether it is proven that no value is valid for both. Conservative: False may mean unknown."""
    document.spend()
    if depth > MAX_DEPTH:
        return False
    lefts, rights = conjuncts(left, document), conjuncts(right, document)
    common = possible_types(left, document) & possible_types(right, document)
    if not common or _list_different_values(left, right, document):
        return True
    if any(_all_branches_disjoint(parts, other, document, depth) for parts, other in ((lefts, right), (rights, left))):
        return True
    return all(_are_disjoint_as(name, lefts, rights, document, depth) for name in common)


def _list_different_values(left: Schema, right: Schema, document: SchemaDocument) -> bool:
    lists = possible_values(left, document), possible_values(right, document)
    if lists[0] is None or lists[1] is None:
        return False
    return set(map(identity, lists[0])).isdisjoint(map(identity, lists[1]))


def _all_branches_disjoint(parts: _Parts, other: Schema, document: SchemaDocument, depth: int) -> bool:
    choices = [part[keyword] for part in parts for keyword in ("anyOf", "oneOf") if keyword in part]
    return any(all(are_disjoint(branch, other, document, depth + 1) for branch in branches) for branches in choices)


def _are_disjoint_as(name: str, lefts: _Parts, rights: _Parts, document: SchemaDocument, depth: int) -> bool:
    pairs = [*product(lefts, rights), *product(rights, lefts)]
    document.spend(len(pairs) // 4)
    if any(_is_below(name, low, high) for low, high in pairs):
        return True
    return name == "object" and any(_differ_in_a_property(one, other, document, depth) for one, other in pairs)


def _is_below(name: str, low: dict[str, Any], high: dict[str, Any]) -> bool:
    """Returns whether all that the one leaves of a type is smaller than all that the other leaves."""
    least, most = _BOUNDS.get(name, ((), ()))
    for maximum, minimum in product((word for word in most if word in low), (word for word in least if word in high)):
        if not is_number(low[maximum]) or not is_number(high[minimum]):
            continue
        touches = maximum.startswith("exclusive") or minimum.startswith("exclusive")
        if low[maximum] < high[minimum] or (touches and low[maximum] == high[minimum]):
            return True
    return False


def _differ_in_a_property(one: dict[str, Any], other: dict[str, Any], document: SchemaDocument, depth: int) -> bool:
    """Returns whether a property that the one requires cannot be valid for both."""
    return any(are_disjoint(_property(one, name), _property(other, name), document, depth + 1) for name in one.get("required", []))


def _property(schema: dict[str, Any], name: str) -> Schema:
    """Returns the schema of a property; anything, for one that only a pattern may name."""
    if name in schema.get("properties", {}):
        found: Schema = schema["properties"][name]
        return found
    return "patternProperties" in schema or schema.get("additionalProperties") is not False
