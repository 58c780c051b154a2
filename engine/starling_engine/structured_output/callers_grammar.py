"""Grammars of callers: the library's dialect of Lark, or GBNF, which the library turns into it.

The library enforces what such a text says, but the text can say that it should not: schemas inside are not rewritten, options
switch checks off. These are found by reading the text as the library does, token by token. Schemas are written anew; a word that
begins one is refused anywhere else, so that no text is read in two ways.
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output.lark import json_text
from starling_engine.structured_output.special_tokens import SpecialTokens

Enforce = Callable[[Any, str], dict[str, Any]]
"""Returns a schema as the library gets it. The text says where it stands."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
      | (?P<comment>(?:\#|//)[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?)
      | (?P<expression>/(?:\\.|[^/\\])+/[imslux]*)
      | (?P<special><[^<>\s]+>)
      | (?P<directive>%[a-z]+)
      | (?P<name>!?[_?]?[a-z][_a-z0-9\-]*)
      | (?P<terminal>_?[A-Z][_A-Z0-9\-]*)
      | (?P<number>[+-]?[0-9][0-9a-fA-FxX.]*)
      | (?P<sign>[-+*?:,.(){}\[\]|&=~_>@])""",
    re.VERBOSE,
)
_SCHEMA = re.compile(r"%(json|regex|lark|llguidance)")
"""Words behind which the library reads another language."""
_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_SET_OPERATION = re.compile(r"&&|--|~~")
_DIRECTIVES = ("%ignore", "%import", "%if")
_ATTRIBUTES = ("suffix", "capture", "stop_capture")
"""Attributes with a value. Others make the output end early, or need tokens to be taken back."""


class LarkToken(NamedTuple):
    """A part of a grammar; `kind` is the name of a group of the expression that finds it."""

    kind: str
    text: str
    line: int


class _Refusal(ValueError):
    """Says what is not possible, but not yet where."""


def enforced_lark(text: str, param: str, tokens: SpecialTokens, enforce: Enforce) -> str:
    """Returns a caller's grammar as the library gets it, which knows special tokens by number. Raises `InvalidRequest`."""
    read = read_lark(text, param, tokens, enforce)
    return "".join(f"<[{tokens.ids[token.text]}]>" if token.kind == "special" else token.text for token in read)


def read_lark(text: str, param: str, tokens: SpecialTokens, enforce: Enforce) -> list[LarkToken]:
    """Returns the parts of a caller's grammar, of which nothing switches enforcement off. Raises `InvalidRequest`."""
    if text.lstrip().startswith("{"):
        raise InvalidRequest("the grammar has to be Lark or GBNF, not JSON", param)
    lark = _from_gbnf(text, param) if _GBNF.search(text) else text
    return _Reader(lark, tokens, enforce).read(param)


def _from_gbnf(text: str, param: str) -> str:
    try:
        lark = gbnf_to_lark(text)
    except Exception as error:  # the library has errors of its own, and fails in others
        raise InvalidRequest(f"the grammar is not GBNF: {str(error)[:200]}", param) from error
    for found in _TOKEN.finditer(lark):
        if found.lastgroup == "expression" and _SET_OPERATION.search(found[0]):
            raise InvalidRequest(
                f"the characters {found[0]} would be read as an operation of sets; write them in another order", param
            )
    return lark


class _Reader:
    """Reads a text once, from left to right, and writes it with other schemas."""

    def __init__(self, text: str, tokens: SpecialTokens, enforce: Enforce) -> None:
        self._text = text
        self._at = 0
        self._last = ""
        """The token before, without white space and comments."""
        self._tokens = tokens
        self._enforce = enforce

    def read(self, param: str) -> list[LarkToken]:
        read: list[LarkToken] = []
        line = 1
        while (start := self._at) < len(self._text):
            try:
                kind, text = self._next()
            except _Refusal as refusal:
                raise InvalidRequest(f"line {line}: {refusal}", param) from None
            read.append(LarkToken(kind, text, line))
            line += self._text.count("\n", start, self._at)
        return read

    def _next(self) -> tuple[str, str]:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise _Refusal(f"{self._text[self._at : self._at + 20]!r} is not Lark")
        self._at = found.end()
        kind, token = str(found.lastgroup), found[0]
        if kind == "directive":
            token = self._directive(token)
        elif kind in ("comment", "string", "expression", "special") and (word := _SCHEMA.search(token)):
            raise _Refusal(f"{word[0]} is not possible in a comment, a string, an expression or the name of a token")
        elif kind == "special":
            self._check_special(token)
        elif kind == "sign":
            self._check_sign(token)
        if kind not in ("space", "comment"):
            self._last = token
        return kind, token

    def _directive(self, word: str) -> str:
        if word in _DIRECTIVES:
            return word
        if word == "%json":
            return self._written(word, self._enforce(self._json(), f"the schema of %json, {self._place()}, $"))
        if word == "%regex":
            return self._written(word, self._json())
        if word == "%llguidance":
            if self._json() != {}:
                raise _Refusal("%llguidance has options that are not possible; {} is")
            return self._written(word, {})
        raise _Refusal(f"{word} is not possible; %json, %regex, {', '.join(_DIRECTIVES)} are")

    def _place(self) -> str:
        return f"line {self._text.count(chr(10), 0, self._at) + 1}"

    def _json(self) -> Any:
        """Reads the JSON that stands here."""
        start = re.compile(r"[ \t\r\n]*").match(self._text, self._at)
        assert start is not None
        try:
            value, self._at = json.JSONDecoder().raw_decode(self._text, start.end())
        except RecursionError:
            raise _Refusal("the JSON is nested too deeply") from None
        except ValueError as error:
            raise _Refusal(f"no JSON follows: {error}") from None
        return value

    def _written(self, word: str, value: Any) -> str:
        # Whoever reads the rules in another way finds no directive in a text of the JSON.
        content = json_text(value).replace("%", "\\u0025")
        return f"{word} {content} "

    def _check_special(self, token: str) -> None:
        if token.startswith("<["):
            raise _Refusal(f"{token}: tokens are possible by name, not by number")
        if token not in self._tokens.ids:
            raise _Refusal(f"the tokenizer has no special token {token}")
        if self._tokens.ids[token] in self._tokens.ends:
            raise _Refusal(f"{token} ends the output, and can stand nowhere in it")

    def _check_sign(self, sign: str) -> None:
        if sign == "@":
            raise _Refusal("there are no other grammars that @ could mean")
        if sign == "~" and not re.compile(r"[ \t]*[+-]?[0-9]").match(self._text, self._at):
            raise _Refusal("~ is not possible: the opposite of an expression has the bytes of special tokens")
        if sign == "=" and self._last not in _ATTRIBUTES:
            raise _Refusal(f"{self._last}= is not possible; {', '.join(_ATTRIBUTES)} are")
