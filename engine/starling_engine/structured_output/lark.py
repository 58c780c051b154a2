"""Writes the library's text of rules, which is a dialect of Lark."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from starling_engine.structured_output import patterns

ANY_TEXT = "/(?s:.*)/"

_SLASH = re.compile(r"\\.|/", re.DOTALL)


class TextPart(NamedTuple):
    """A part of an output that is text: what it may be, as a part of a terminal."""

    terminal: str


class RulePart(NamedTuple):
    """A part of an output that is more than text: a token, a schema, a choice of such parts."""

    rule: str


Part = TextPart | RulePart


class LarkRules:
    """Rules while they are written. A run of texts becomes one terminal, so that the library matches it as one expression.

    As a row of terminals it would take the longest match of each: text would swallow what has to follow.
    """

    def __init__(self) -> None:
        self._rules: list[str] = []

    def written(self, output: Sequence[Part]) -> str:
        """Returns all rules, of which the first says what an output is."""
        return "\n".join([f"start: {self._row(output)}", *self._rules])

    def one_of(self, branches: Sequence[Sequence[Part]]) -> RulePart:
        return RulePart(self._named("r", " | ".join(self._row(parts) for parts in branches)))

    def _row(self, parts: Sequence[Part]) -> str:
        row: list[str] = []
        texts: list[str] = []
        for part in parts:
            if isinstance(part, TextPart):
                texts.append(part.terminal)
            else:
                row += [*self._terminal(texts), part.rule]
                texts = []
        return " ".join([*row, *self._terminal(texts)]) or '""'

    def _terminal(self, texts: list[str]) -> list[str]:
        return [self._named("T", " ".join(texts))] if texts else []

    def _named(self, prefix: str, rule: str) -> str:
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}: {rule}")
        return name


def literal(text: str) -> str:
    """Returns a string that stands for exactly this text."""
    return json_text(text).replace("\x7f", "\\u007f")


def json_text(value: Any) -> str:
    """Returns JSON as it stands in rules."""
    return json.dumps(value, ensure_ascii=False)


def expression(regex: str) -> str:
    """Returns an expression, as a part of which alternatives stay by themselves."""
    escaped = _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], regex)
    return f"/(?:{escaped})/"


def text_without(words: Collection[str]) -> str:
    """Returns the terminal of all texts that contain none of the words."""
    if not words:
        return ANY_TEXT
    # The opposite alone would have the bytes of special tokens, which are no valid text.
    listed = "|".join(patterns.literal(word) for word in words)
    return f"({ANY_TEXT} & ~/(?s:.*)(?:{listed})(?s:.*)/)"
