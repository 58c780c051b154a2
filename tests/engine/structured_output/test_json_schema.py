"""Keywords that the library lacks are said in others, or refused with their path."""

from typing import Any

import pytest
from starling_engine.errors import InvalidRequest
from starling_engine.structured_output import json_grammar, rewrite

from tests.engine.structured_output.matching import Matcher

CLOSED = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 0.5]),
        ({"oneOf": [{"maxLength": 1}, {"minLength": 3}], "type": "string"}, ["a", "abc"], ["ab"]),
        ({"oneOf": [{"minimum": 0}, {"maximum": 5}], "type": "integer"}, [-1, 6], [0, 3]),
        ({"type": "string", "not": {"enum": ["a", "ab"]}}, ["", "b", "abc"], ["a", "ab"]),
        ({"type": "integer", "not": {"const": 3}}, [2, 4], [3]),
        ({"type": "object", "not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
        ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}, 5], [{"a": 1}]),
        ({"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, [{"c": 1, "d": 1}], [{"a": 1}, {"c": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"b": 1}], [{"c": 1}]),
        ({"type": "array", "contains": {"const": 1}, "maxItems": 3}, [[1], [2, 3, 1]], [[], [2, 3], [1, 1, 1, 1]]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [[], [2, 1]], [[1, 1], [2, 1, 2]]),
        ({"items": {"type": "boolean"}, "uniqueItems": True}, [[True, False], "a"], [[True, True]]),
        ({"items": [{"type": "integer"}], "additionalItems": False}, [[], [1]], [["a"], [1, 1]]),
        ({**CLOSED, "minProperties": 2}, [{"a": 1, "b": 1}, {"a": 1, "c": 1}], [{}, {"b": 1}]),
        ({**CLOSED, "maxProperties": 1}, [{}, {"c": 1}], [{"a": 1, "b": 1}]),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, [{"a": 1}, {"z": 1}], [{}]),
        (
            {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False, "type": "object"},
            [{"a": 1, "b": 1}],
            [{"c": 1}],
        ),
        ({"type": "string", "const": "a", "x-guidance": {"lenient": True}}, ["a"], ["b"]),
        ({"type": "integer", "not": {"maxItems": 2}}, [], [[1, 2, 3]]),
        ({"$ref": "#kind", "$defs": {"a": {"$anchor": "kind", "type": "null"}}}, [None], [1]),
        ({"$id": "https://e.com/a", "$ref": "b", "$defs": {"x": {"$id": "b", "type": "null"}}}, [None], [1]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ["a"], [None]),
        ({"oneOf": [{"type": "string", "nullable": True}, {"type": "null"}]}, ["a"], [None]),
    ],
)
def test_a_keyword_is_enforced(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    if not valid:
        with pytest.raises(InvalidRequest):
            Matcher(schema)
        return
    matcher = Matcher(schema)
    assert [value for value in valid if not matcher.accepts(value)] == []
    assert [value for value in invalid if matcher.accepts(value)] == []


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"items": {"contains": {"const": 1}}}}}, "$.properties.a.items.contains"),
        ({"properties": {"a b": {"foo": 1}}}, '$.properties["a b"].foo'),
        ({"anyOf": [{}, {"type": "text"}]}, "$.anyOf[1].type"),
        ({"$defs": {"x": {"format": "regex"}}, "$ref": "#/$defs/x"}, "$.$defs.x.format"),
        ({"items": {"$ref": "#/nowhere"}}, "$.items.$ref"),
        ({"not": {"type": "integer"}}, "$.not"),
        ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, "$.if"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "$.oneOf"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "$.patternProperties"),
        ({"minProperties": 2}, "$.minProperties"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "$.maxProperties"),
        ({"uniqueItems": True, "items": {"type": "string"}, "type": "array"}, "$.uniqueItems"),
        ({"type": "object", "discriminator": {"propertyName": "a"}}, "$.discriminator"),
        ({"$dynamicRef": "#a"}, "$.$dynamicRef"),
        ({"minLength": -1}, "$.minLength"),
        ({"multipleOf": 0}, "$.multipleOf"),
        ({"maximum": 2**53}, "$.maximum"),
        ({"const": [2**60]}, "$.const"),
        ({"const": "a\x00b"}, "$.const"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "$.exclusiveMinimum"),
        ({"type": "number", "exclusiveMaximum": -1, "minimum": -1.5}, "$.exclusiveMaximum"),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, "$"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "$"),
        (False, "$"),
    ],
)
def test_a_refusal_names_the_path(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        rewrite(schema, "response_format")
    assert str(refusal.value).startswith(f"{path}: ")
    assert refusal.value.param == "response_format"


def test_properties_come_in_the_order_in_which_they_are_read() -> None:
    matcher = Matcher({"allOf": [{"properties": {"a": {}}, "required": ["a"]}], "properties": {"b": {}}, "type": "object"})
    assert matcher.accepts_text('{"a":1,"b":2}')
    assert not matcher.accepts_text('{"b":2,"a":1}')


def test_another_spelling_of_a_property_is_not_another_property() -> None:
    matcher = Matcher({"properties": {"foo": {"type": "integer"}}, "additionalProperties": {"type": "string"}})
    assert matcher.accepts_text('{"foo":1}')
    assert not matcher.accepts_text('{"\\u0066oo":"a"}')


def test_white_space_is_free_and_bounded() -> None:
    matcher = Matcher({"type": "array", "items": {"type": "integer"}})
    assert matcher.accepts_text("[ 1,\n  2 ]")
    assert not matcher.accepts_text("[" + " " * 41 + "1]")
    assert not matcher.accepts_text("[1] ")


def test_a_schema_without_values_is_refused_by_the_grammar() -> None:
    with pytest.raises(InvalidRequest, match=r"^\$: Unsatisfiable"):
        json_grammar({"type": "string", "const": 1})
