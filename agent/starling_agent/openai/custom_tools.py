"""Custom tools, whose calls are texts: for the model each is a function with one argument, which is that text."""

import json
import re
from typing import Any

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.lark import expression

from starling_agent.openai.protocol.base import refuse_unknown, shown
from starling_agent.parsers.json_text import decoded, valid_text, whole_json
from starling_agent.parsers.schemas import GrammarSchema

INPUT = "input"
"""The argument that is the text."""
_WHOLE_INPUT = "The whole input, as text."
_END_ANCHOR = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")
_BEGINNING = f'{{"{INPUT}":"'
"""Stands before the text, with any white space after the brace and around the colon."""
_AFTER_SPACE = {1, len(_BEGINNING) - 2, len(_BEGINNING) - 1}
"""Places in the beginning that white space may be before."""
_TEXT = re.compile(r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])\w{4}|\\u\w{4}(?=[^\\]|\\[^u]|\\u\w{4}))*')
"""Matches a JSON string up to its end, or to the half of a character whose other half may follow."""


def input_schema(form: Any, param: str) -> dict[str, Any]:
    """Returns the schema of the arguments of a tool with that `format`. Raises InvalidRequest."""
    match form:
        case None | {"type": "text"}:
            refuse_unknown(form or {}, {"type"}, param)
            return {
                "type": "object",
                "properties": {INPUT: {"type": "string", "description": _WHOLE_INPUT}},
                "required": [INPUT],
            }
        case {"type": "grammar"}:
            refuse_unknown(form, {"type", "grammar"}, param)
            return _grammar_schema(form.get("grammar"), f"{param}.grammar")
    raise InvalidRequest(f"must be an object of the type text or grammar, got {shown(form)}", param)


def _grammar_schema(grammar: Any, param: str) -> GrammarSchema:
    if not isinstance(grammar, dict):
        raise InvalidRequest(f"must be an object with syntax and definition, got {shown(grammar)}", param)
    refuse_unknown(grammar, {"syntax", "definition"}, param)
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if syntax not in ("lark", "regex"):
        raise InvalidRequest(f"must be lark or regex, got {shown(syntax)}", f"{param}.syntax")
    if not isinstance(definition, str):
        raise InvalidRequest(f"must be a text, got {shown(definition)}", f"{param}.definition")
    if syntax == "regex":
        described, lark = f"It matches this regular expression:\n{definition}", _lark_of_expression(definition)
    else:
        described, lark = f"It has this Lark grammar:\n{definition}", definition
    return GrammarSchema(INPUT, lark, f"{param}.definition", f"{_WHOLE_INPUT} {described}")


def _lark_of_expression(pattern: str) -> str:
    """Returns the grammar of the texts that an expression matches as a whole, where anchors at its ends say nothing.

    Its syntax is that of Rust's crate, as in OpenAI's API, and in expressions within Lark grammars.
    """
    whole = _END_ANCHOR.sub(r"\1", pattern.removeprefix("^"))
    return f"start: {expression(whole)}"


class InputReader:
    """Reads the text of one call out of its arguments, in pieces. Where a model wrote other arguments, their JSON is the text."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        """Pieces without a text yet."""
        self._matched = 0
        """Characters of the beginning that are there."""
        self._is_other = False
        """The arguments begin with something else."""
        self._held = ""
        """The half of a character that the text has up to now."""
        self._has_ended = False

    def feed(self, arguments: str) -> str:
        """Takes a piece of the arguments. Returns the text that is known with it."""
        if self._has_ended:
            return ""
        if self._matched < len(_BEGINNING):
            self._arguments.append(arguments)
            arguments = "" if self._is_other else self._behind_beginning(arguments)
        text = self._held + arguments
        match = _TEXT.match(text)
        known = match.group() if match else ""
        self._held = text[len(known) :]
        self._has_ended = self._held.startswith('"')
        return decoded(f'"{known}"')

    def _behind_beginning(self, arguments: str) -> str:
        """Returns what the piece has of the text, if that has begun."""
        for at, character in enumerate(arguments):
            if self._matched == len(_BEGINNING):
                return arguments[at:]
            if character == _BEGINNING[self._matched]:
                self._matched += 1
            elif not (character.isspace() and self._matched in _AFTER_SPACE):
                self._is_other = True
                break
        return ""

    def rest(self) -> str:
        """Takes the end of the arguments, also of a call that was cut. Returns the text that is left."""
        if self._has_ended:
            return ""
        if self._matched == len(_BEGINNING):
            return decoded(whole_json(f'"{self._held}'))
        if not self._is_other:  # cut before the text
            return ""
        arguments = "".join(self._arguments)
        try:
            return valid_text(json.loads(whole_json(arguments))[INPUT])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return arguments
