"""Types that people write are honoured: what their schema allows is accepted, and what it forbids is not."""

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from starling_engine.errors import InvalidRequest

from tests.engine.structured_output.matching import Matcher
from tests.engine.structured_output.usual_types import schemas

SCHEMAS = schemas()
REFUSED = {
    "set": "$.uniqueItems",
    "frozenset": "$.uniqueItems",
    "number between integers": "$.exclusiveMinimum",
}
"""Types that are refused, and the path that the refusal begins with."""
IN_WORDS_OF_2020_12: dict[str, dict[str, Any]] = {
    "OpenAPI: nullable": {"type": ["string", "null"]},
    "OpenAPI: nullable reference": {"type": ["integer", "null"]},
    "OpenAPI: exclusive flag": {"type": "number", "exclusiveMinimum": 0},
}
"""Schemas whose own keywords the judge does not know."""
OTHERS = (None, True, 0, 3, -1, 11, 0.5, 1.75, "", "a", "red", "2023-02-29", "x" * 9, [], [0], ["a", "a"], {}, {"a": 1})


def mutants(value: Any) -> Iterator[Any]:
    """Yields values that differ from this one in one place."""
    yield from OTHERS
    if isinstance(value, dict):
        for name, child in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            yield from ({**value, name: mutant} for mutant in mutants(child))
        yield {**value, "another": 1}
    if isinstance(value, list):
        yield [*value, *value[-1:]]
        for at, child in enumerate(value):
            yield value[:at] + value[at + 1 :]
            yield from ([*value[:at], mutant, *value[at + 1 :]] for mutant in mutants(child))
    if isinstance(value, str):
        yield from (value[:-1], value + "x", value.upper(), value.replace("-", ""), "\n" + value)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in REFUSED])
def test_values_of_the_type_are_accepted_and_no_others(name: str) -> None:
    schema, values = SCHEMAS[name]
    matcher = Matcher(schema)
    assert values
    assert [value for value in values if not matcher.accepts(value)] == []
    judge = jsonschema_rs.Draft202012Validator(IN_WORDS_OF_2020_12.get(name, schema), validate_formats=True)
    tried = [mutant for value in values for mutant in mutants(value)]
    assert [mutant for mutant in tried if matcher.accepts(mutant) and not judge.is_valid(mutant)] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_that_cannot_be_enforced_is_refused_with_its_path(name: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Matcher(SCHEMAS[name][0])
    assert str(refusal.value).startswith(f"{REFUSED[name]}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OpenAPI: nullable", 1),
        ("OpenAPI: nullable reference", "a"),
        ("OpenAPI: exclusive flag", 0),
        ("set of an enum", ["red", "red"]),
        ("bounded fields", {"count": 3, "share": 0.5, "code": "AB123", "name": "n", "parts": [1]}),
        ("OpenAPI: condition", {"country": "US", "code": "1234AB"}),
        ("OpenAPI: one of two properties", {"a": 1, "b": 2}),
    ],
)
def test_what_the_keyword_forbids_is_not_accepted(name: str, value: Any) -> None:
    assert not Matcher(SCHEMAS[name][0]).accepts(value)
