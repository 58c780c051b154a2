"""The library's grammar of a schema that was rewritten, with what a schema cannot say: how JSON is written."""

import json
from typing import Any

import llguidance

WHITE_SPACE = r"[ \n\r\t]{1,40}"
"""White space at each place that may have some. A model that may write endless spaces does so until its tokens are spent."""
ESCAPES = 'nrbtf\\"'
"""Escapes in strings. Names of properties are compared as text: spelled with `\\u`, a listed one would pass as another.
Strings with a control character that has no letter of its own are lost."""


def written_grammar(written: dict[str, Any]) -> str:
    """Returns the library's grammar for a schema as `rewrite` returns it. Raises `ValueError` where the library has none."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(written), overrides={"whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": ESCAPES}
    )
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed or messages:
        raise ValueError(messages[0].splitlines()[0])
    return grammar


def are_exclusive(patterns: list[str]) -> bool:
    """Returns whether the library knows that no name matches two of these translated patterns."""
    if len(patterns) < 2:
        return True
    schema = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    return not llguidance.LLMatcher.validate_grammar(grammar)
