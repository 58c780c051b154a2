"""Keywords of objects that the library lacks, or enforces in some cases only, said by those that it has."""

from itertools import combinations
from math import comb
from typing import Any

from starling_engine.structured_output.document import SchemaDocument
from starling_engine.structured_output.formats import as_keywords
from starling_engine.structured_output.keywords import Schema, is_annotation
from starling_engine.structured_output.values import conjuncts, listed_strings

MAX_CHOICES = 64
"""Sets of properties that are listed for `minProperties` or `maxProperties`."""
KEYWORDS = ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
CONDITIONAL = frozenset(("anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef", "patternProperties", "additionalProperties"))


def with_named_properties(schema: dict[str, Any], document: SchemaDocument, origin: Any) -> dict[str, Any]:
    """Returns the schema with what says `propertyNames`: listed properties, or a pattern."""
    names = schema["propertyNames"]
    rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    if names in (True, {}):
        return rest
    if names is False:
        return {**rest, "additionalProperties": False, "properties": {}, "allOf": [*rest.get("allOf", []), {"maxProperties": 0}]}
    listed, pattern = listed_strings(names, document), _name_pattern(names, document)
    properties: dict[str, Schema] = rest.get("properties", {})
    if listed is not None and "patternProperties" not in rest:
        others = {name: rest.get("additionalProperties", True) for name in listed if name not in properties}
        kept = {name: part if name in listed else False for name, part in properties.items()}
        return {**rest, "properties": {**kept, **others}, "additionalProperties": False}
    if pattern is not None and not properties and "patternProperties" not in rest:
        by_pattern = {pattern: rest.get("additionalProperties", True)}
        return {**rest, "patternProperties": by_pattern, "additionalProperties": False}
    reason = "propertyNames is possible with enum, or alone with one of pattern, format, minLength and maxLength"
    raise document.refusal(origin, "propertyNames", reason)


def _name_pattern(names: Schema, document: SchemaDocument) -> str | None:
    """The pattern that says all of what `propertyNames` does, if there is one."""
    parts = [part for part in conjuncts(names, document) if set(_restrictions(part)) - {"$ref"}]
    if len(parts) != 1:
        return None
    restrictions = {word: value for word, value in _restrictions(parts[0]).items() if word != "$ref"}
    if restrictions.pop("type", "string") != "string":
        return None
    if "format" in restrictions and len(restrictions) == 1:
        restrictions = as_keywords(restrictions["format"]) or {}
    if restrictions.keys() == {"pattern"}:
        return str(restrictions["pattern"])
    if restrictions and restrictions.keys() <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{int(restrictions.get('minLength', 0))},{_text(restrictions.get('maxLength'))}}}$"
    return None


def _restrictions(schema: dict[str, Any]) -> dict[str, Any]:
    return {word: value for word, value in schema.items() if not is_annotation(word)}


def _text(count: float | None) -> str:
    return "" if count is None else str(int(count))


def with_evaluated_properties(schema: dict[str, Any], document: SchemaDocument, origin: Any) -> dict[str, Any]:
    """Returns the schema with what says `unevaluatedProperties`, where it is certain which properties were evaluated."""
    unevaluated = schema["unevaluatedProperties"]
    rest = {keyword: value for keyword, value in schema.items() if keyword != "unevaluatedProperties"}
    if unevaluated in (True, {}) or "additionalProperties" in rest:
        return rest
    document.place(rest, origin)
    parts = conjuncts(rest, document)
    if len(parts) == 1 and not CONDITIONAL - {"patternProperties"} & rest.keys():
        return {**rest, "additionalProperties": unevaluated}
    if any((CONDITIONAL | {"unevaluatedProperties"}) & part.keys() for part in parts):
        reason = "unevaluatedProperties is possible beside properties, allOf and $ref that only list properties"
        raise document.refusal(origin, "unevaluatedProperties", reason)
    evaluated = {name: True for part in parts for name in part.get("properties", {})}
    closing = {"properties": evaluated, "additionalProperties": unevaluated}
    return {**rest, "allOf": [*rest.get("allOf", []), closing]}


class PropertyCounts:
    """`minProperties` and `maxProperties` of one schema.

    The library counts properties that patterns or `additionalProperties` admit, but not those that are listed and optional.
    It does not see that a property comes twice, so that it can promise one more than the required ones and no more.
    """

    def __init__(self, schema: dict[str, Any], document: SchemaDocument, origin: Any) -> None:
        self._schema = schema
        self._document = document
        self._origin = origin
        required = set(schema.get("required", []))
        properties: dict[str, Schema] = schema.get("properties", {})
        self._optional = [name for name, part in properties.items() if name not in required and part is not False]
        self._is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
        self._least = max(0, int(schema.get("minProperties", 0)) - len(required))
        self._most = max(0, int(schema["maxProperties"]) - len(required)) if "maxProperties" in schema else None
        self._has_too_many = len(required) > schema.get("maxProperties", len(required))

    def said_otherwise(self) -> tuple[dict[str, Any], list[Schema]]:
        """Returns the schema without counts that the library lacks, and schemas that say these."""
        if self._has_too_many or not (self._least or self._most is not None):
            return self._schema, []
        if not self._optional:
            return self._countable()
        rest = {word: value for word, value in self._schema.items() if word not in ("minProperties", "maxProperties")}
        return rest, [*self._at_least(), *self._at_most()]

    def _countable(self) -> tuple[dict[str, Any], list[Schema]]:
        if self._least > 1 and not self._is_closed:
            reason = (
                "minProperties is possible up to one more than the required properties: one that comes twice would be counted twice"
            )
            raise self._document.refusal(self._origin, "minProperties", reason)
        return self._schema, []

    def _at_least(self) -> list[Schema]:
        if self._least == 0:
            return []
        if self._is_closed:
            return [self._choice("minProperties", [{"required": names} for names in self._sets("minProperties", self._least)])]
        if self._least > 1:
            return self._countable()[1]
        required = self._schema.get("required", [])
        absent: Schema = {
            "properties": dict.fromkeys(self._optional, False),
            "required": required,
            "minProperties": len(set(required)) + 1,
        }
        return [self._choice("minProperties", [*({"required": [name]} for name in self._optional), absent])]

    def _at_most(self) -> list[Schema]:
        if self._most is None:
            return []
        absent = len(self._optional) - self._most
        if not self._is_closed and self._most > 0:
            reason = "maxProperties is possible where all listed properties are required, or additionalProperties is false"
            raise self._document.refusal(self._origin, "maxProperties", reason)
        if not self._is_closed:
            return [{"properties": dict.fromkeys(self._schema.get("required", []), True), "additionalProperties": False}]
        if absent <= 0:
            return []
        sets = self._sets("maxProperties", absent)
        return [self._choice("maxProperties", [{"properties": dict.fromkeys(names, False)} for names in sets])]

    def _sets(self, keyword: str, size: int) -> list[list[str]]:
        if comb(len(self._optional), size) > MAX_CHOICES:
            reason = f"{keyword} is possible for at most {MAX_CHOICES} choices of optional properties"
            raise self._document.refusal(self._origin, keyword, reason)
        return [list(names) for names in combinations(self._optional, size)]

    def _choice(self, keyword: str, branches: list[Schema]) -> Schema:
        if len(branches) > MAX_CHOICES:
            raise self._document.refusal(self._origin, keyword, f"{keyword} is possible for at most {MAX_CHOICES} properties")
        return {"anyOf": branches} if branches else False
