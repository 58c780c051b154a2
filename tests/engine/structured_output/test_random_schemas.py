"""Schemas of any keywords in any place: no value is accepted that a validator of others refuses."""

import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from starling_engine.errors import InvalidRequest

from tests.engine.structured_output.matching import Matcher

SCALARS = (None, True, False, 0, 1, 2, 3, -1, 0.5, 1.5, 10, "", "a", "b", "ab", "abc", "aaa")
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object", ["string", "null"], ["integer", "object"])
SIMPLE = (True, {"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", 2]}, {"required": ["a"]})


class Schemas:
    """Draws schemas, nested three deep at most."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def document(self) -> dict[str, Any]:
        return {**self._keywords(0), "$defs": {"x": self.schema(2), "y": self.schema(2)}}

    def schema(self, depth: int) -> Any:
        return self.draw.choice(SIMPLE) if depth > 2 or self.draw.random() < 0.05 else self._keywords(depth)

    def _keywords(self, depth: int) -> dict[str, Any]:
        choices = self._choices(lambda: self.schema(depth + 1))
        return dict(choices[self.draw.randrange(len(choices))]() for _ in range(self.draw.choice((1, 1, 2, 2, 3, 4))))

    def _choices(self, part: Callable[[], Any]) -> list[Callable[[], tuple[str, Any]]]:
        pick = self.draw.choice
        typed: list[Callable[[], tuple[str, Any]]] = [lambda: ("type", pick(TYPES))] * 3
        return [
            *typed,
            lambda: ("const", pick((*SCALARS, [1], {"a": 1}))),
            lambda: ("enum", [pick(SCALARS) for _ in range(3)]),
            lambda: (pick(("minimum", "exclusiveMinimum")), pick((-1, 0, 1, 0.5, 2))),
            lambda: (pick(("maximum", "exclusiveMaximum")), pick((-1, 0, 1, 0.5, 2, 10))),
            lambda: ("multipleOf", pick((1, 2, 0.5, 3))),
            lambda: (pick(("minLength", "maxLength", "minItems", "maxItems")), pick((0, 1, 2, 3))),
            lambda: ("pattern", pick(("^a", "b$", "^a*$", "[ab]", "^.$", "^[^a]", "a|^b"))),
            lambda: ("items", part()),
            lambda: ("prefixItems", [part()]),
            lambda: ("properties", {name: part() for name in self.draw.sample(("a", "b", "c", "aa"), 2)}),
            lambda: ("required", self.draw.sample(("a", "b", "c"), pick((1, 2)))),
            lambda: ("additionalProperties", pick((False, part()))),
            lambda: ("patternProperties", {pick(("^a", "b", "c$")): part()}),
            lambda: (pick(("anyOf", "oneOf", "allOf")), [part() for _ in range(pick((1, 2, 3)))]),
            lambda: (pick(("not", "if", "then", "else", "contains")), part()),
            lambda: ("dependentRequired", {pick("abc"): [pick("abc")]}),
            lambda: ("dependentSchemas", {pick("abc"): part()}),
            lambda: ("uniqueItems", True),
            lambda: (pick(("minProperties", "maxProperties")), pick((0, 1, 2))),
            lambda: ("propertyNames", pick(({"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "b"]}))),
            lambda: ("$ref", pick(("#/$defs/x", "#/$defs/y"))),
            lambda: (pick(("unevaluatedProperties", "unevaluatedItems")), pick((False, part()))),
        ]

    def value(self, depth: int = 0) -> Any:
        kind = self.draw.random()
        if kind < 0.5 or depth > 2:
            return self.draw.choice(SCALARS)
        if kind < 0.7:
            return [self.value(depth + 1) for _ in range(self.draw.choice((0, 1, 2, 3)))]
        names = self.draw.sample(("a", "b", "c", "aa", "ab"), self.draw.choice((0, 1, 2, 3)))
        return {name: self.value(depth + 1) for name in names}


@pytest.mark.parametrize("seed", range(4))
def test_no_value_is_accepted_that_is_not_valid(seed: int) -> None:
    schemas, taken = Schemas(seed), 0
    for _ in range(400):
        schema = schemas.document()
        try:
            matcher = Matcher(schema)
        except InvalidRequest:
            continue
        taken += 1
        judge = jsonschema_rs.Draft202012Validator(schema)
        for value in [schemas.value() for _ in range(20)]:
            assert judge.is_valid(value) or not matcher.accepts(value), (schema, value)
    assert taken > 100
