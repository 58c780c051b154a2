"""The library's grammars of schemas that were rewritten, with what a schema cannot say: how JSON is written."""

import json
from typing import Any

import llguidance

from starling_engine.errors import InvalidRequest

Grammar = dict[str, Any]
"""A grammar of the library: a schema (`json_schema`) or a text of rules (`lark_grammar`), and the name by which others call it."""

WHITE_SPACE = r"[ \n\r\t]{1,40}"
"""White space at each place that may have some. A model that may write endless spaces does so until its tokens are spent."""
ESCAPES = 'nrbtf\\"'
"""Escapes in strings. Names of properties are compared as text: spelled with `\\u`, a listed one would pass as another.
Strings with a control character that has no letter of its own are lost."""


def grammar_text(*grammars: Grammar) -> str:
    """Returns grammars as the library reads them; the first is where an output begins."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def check_unicode(text: str, param: str) -> None:
    """Raises `InvalidRequest` for a text that the library cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the text is not valid Unicode: it holds half of a surrogate pair", param) from None


def spelled(written: dict[str, Any], *, white_space: bool = True) -> dict[str, Any]:
    """Returns a schema, as `rewrite` does, that also says how JSON is written: with white space between tokens or none.

    Raises `ValueError` where the library has no grammar for it.
    """
    spaces: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE} if white_space else {"whitespace_flexible": False}
    schema = {**written, "x-guidance": {**spaces, "json_allowed_escapes": ESCAPES}}
    if fault := fault_of({"json_schema": schema}):
        raise ValueError(fault)
    return schema


def fault_of(grammar: Grammar) -> str | None:
    """Returns why the library has no grammar for this, if so."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar_text(grammar))
    return messages[0].splitlines()[0] if failed or messages else None


def are_exclusive(patterns: list[str]) -> bool:
    """Returns whether the library knows that no name matches two of these translated patterns."""
    if len(patterns) < 2:
        return True
    schema = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    return not llguidance.LLMatcher.validate_grammar(grammar)
