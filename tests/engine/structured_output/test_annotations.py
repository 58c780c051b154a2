"""Annotations are removed as keywords alone: what bears the same name elsewhere stays."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starling_engine.structured_output import rewrite
from starling_engine.structured_output.keywords import ANNOTATIONS

NAMES = st.sampled_from(sorted(ANNOTATIONS | {"x-foo", "x-guidance", "x-"}))
ANNOTATED = st.dictionaries(st.sampled_from(["title", "description", "default", "$comment", "x-order", "x-guidance"]), st.just("a"))


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.sampled_from([{"type": "string"}, {"type": "integer"}, {"const": {"title": 1, "x-foo": 2}}, {"enum": ["a", "title"]}])


def schemas(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)},
            st.dictionaries(NAMES, children, max_size=3),
        ),
        st.builds(lambda part: {"type": "array", "prefixItems": [part], "items": part}, children),
        st.builds(lambda part: {"type": "object", "patternProperties": {"^title": part}, "additionalProperties": part}, children),
        st.builds(lambda parts: {"anyOf": parts}, st.lists(children, min_size=1, max_size=2)),
        st.builds(lambda part: {"type": "object", "dependentSchemas": {"x-foo": part}}, children),
        st.builds(lambda part: {"if": {"const": "title"}, "then": part}, children),
    )


def annotated(schema: Any, notes: dict[str, Any]) -> Any:
    """The schema with annotations in all its schemas, and nowhere else."""
    if not isinstance(schema, dict):
        return schema
    found = {}
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "dependentSchemas"):
            found[keyword] = {name: annotated(part, notes) for name, part in value.items()}
        elif keyword in ("anyOf", "prefixItems"):
            found[keyword] = [annotated(part, notes) for part in value]
        elif keyword in ("items", "additionalProperties", "if", "then"):
            found[keyword] = annotated(value, notes)
        else:
            found[keyword] = value
    return {**notes, **found}


SCHEMAS = st.recursive(leaves(), schemas, max_leaves=6)


@given(SCHEMAS, ANNOTATED)
def test_a_schema_is_the_same_with_annotations_and_without(schema: dict[str, Any], notes: dict[str, Any]) -> None:
    assert rewrite(annotated(schema, notes)) == rewrite(schema)


@given(st.dictionaries(NAMES, leaves(), min_size=1))
def test_a_property_named_as_an_annotation_stays(properties: dict[str, Any]) -> None:
    written = rewrite({"type": "object", "properties": properties, "required": list(properties)})
    assert list(written["properties"]) == list(properties) == written["required"]


@pytest.mark.parametrize("value", [{"title": "a"}, {"x-guidance": {"lenient": True}}, {"default": {"description": None}}])
def test_values_of_const_and_enum_stay_as_they_are(value: Any) -> None:
    assert rewrite({"const": value, "enum": [value]}) == {"const": value, "enum": [value]}


def test_the_schema_of_the_caller_is_not_changed() -> None:
    schema = {"title": "a", "x-guidance": {"lenient": True}, "oneOf": [{"title": "b", "type": "string"}, {"type": "null"}]}
    before = repr(schema)
    rewrite(schema)
    assert repr(schema) == before
