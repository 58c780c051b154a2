"""Grammars of callers for texts that stand in a JSON string, as the inputs of tools do: rules of what JSON writes of them.

JSON writes quotes, backslashes and line ends with a backslash before them. The library's lexer looks one byte ahead: at a
backslash it cannot tell whether a terminal goes on. So a grammar that has such characters becomes one terminal, which it can
only if none of its rules calls itself. In other grammars all terminals end before the closing quote, and they stay as they are.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from starling_engine.errors import InvalidRequest
from starling_engine.structured_output import patterns
from starling_engine.structured_output.callers_grammar import LarkToken, read_lark
from starling_engine.structured_output.grammar import check_unicode
from starling_engine.structured_output.json_expressions import UnsupportedExpression, in_json
from starling_engine.structured_output.special_tokens import SpecialTokens

COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's `common` with characters that JSON writes in another way; others stay as they are.

https://github.com/lark-parser/lark/blob/master/lark/grammars/common.lark
"""
_WRITTEN_OTHERWISE = re.compile(r'["\\\x00-\x1f]')
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ATOMS = ("string", "expression", "terminal")
_CONVERTED = {"[": "(", "]": ")?"}
_IMPORT = re.compile(r"common(?:\.(?P<name>[A-Z_]+)(?:->(?P<own>_?[A-Z][A-Z0-9_]*))?|\((?P<names>[A-Z_,]+)\))")
_QUOTE = '"\\""'
Refusal = Callable[[LarkToken, str], InvalidRequest]
"""Makes the error of what is wrong with a token."""
_RULE, _TEXT, _IGNORED = "RULE-", "JSON-TEXT", "IGNORED-TEXT"
"""Names have hyphens, which those of Lark have not."""


class _Definition(NamedTuple):
    """A rule, or a terminal, and what it is made of."""

    is_rule: bool
    body: list[LarkToken]


def json_lark(text: str, param: str, tokens: SpecialTokens) -> str:
    """Returns rules for what JSON writes of a text that has a caller's grammar, up to and with the quote behind it.

    Raises `InvalidRequest`.
    """
    check_unicode(text, param)
    read = [token for token in read_lark(text, param, tokens, lambda schema, _: schema) if token.kind != "comment"]
    try:
        grammar = _Grammar(read, param)
        return grammar.as_terminal() if grammar.is_written_otherwise() else _ended(read)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the string {error.doc[:100]} has an escape that is not possible", param) from None


def _ended(tokens: Sequence[LarkToken]) -> str:
    """Returns a grammar as it is, but for the quote behind it."""
    begin = _TEXT.lower()
    text = "".join(begin if _rule_name(token) == "start" else token.text for token in tokens)
    return f"{text}\nstart: {begin} {_QUOTE}"


class _Grammar:
    """A caller's grammar, taken apart: its statements, without white space and names of trees."""

    def __init__(self, tokens: Sequence[LarkToken], param: str) -> None:
        self._param = param
        self._definitions: dict[str, _Definition] = {}
        self._ignored: list[list[LarkToken]] = []
        self._imported: dict[str, str] = {}
        """Names in `common`, by those that the grammar has for them."""
        for statement in _statements(tokens, self._refusal):
            self._add(statement)
        if "start" not in self._definitions:
            raise InvalidRequest("there is no rule start", param)

    def is_written_otherwise(self) -> bool:
        """Returns whether JSON writes some of the texts in another way."""
        bodies = [*self._ignored, *(one.body for one in self._definitions.values())]
        differs = [self._text(token) != token.text for body in bodies for token in body]
        return any(differs) or not COMMON.keys().isdisjoint(self._imported.values())

    def as_terminal(self) -> str:
        """Returns the grammar as one terminal, of which its rules are parts."""
        self._check_recursion()
        lines = [f"start: {_TEXT}", f"{_TEXT}: {_RULE}START {_QUOTE}", *map(self._import, self._imported.items())]
        if self._ignored:
            ignored = " | ".join(f"({self._body(body)})" for body in self._ignored)
            lines.append(f"{_IGNORED}: ({ignored})*")
        for name, (is_rule, body) in self._definitions.items():
            lines.append(f"{_terminal(name)}: {self._body(body, has_ignored=is_rule and bool(self._ignored))}")
        return "\n".join(lines)

    # ---- what it has ----

    def _add(self, statement: list[LarkToken]) -> None:
        head, *body = statement
        if head.kind in ("name", "terminal"):
            self._define(head, body)
        elif head.text == "%ignore":
            self._ignored.append(body)
        elif head.text == "%import":
            self._import_names(head, "".join(token.text for token in body))
        elif not head.text.startswith("%llguidance"):
            raise self._refusal(head, f"{head.text.split()[0]} is no beginning of a rule")

    def _define(self, head: LarkToken, body: list[LarkToken]) -> None:
        if not _is(body, 0, ":") or _is(body, 1, ":"):
            raise self._refusal(head, f"{head.text} has to have a colon behind it; there are no attributes and priorities here")
        name = _rule_name(head) or head.text
        if name.upper().startswith(_RULE) or name.upper() in (_TEXT, _IGNORED):
            raise self._refusal(head, f"{name} is a name that stands for a part of the call; take another one")
        if name in self._definitions:
            raise self._refusal(head, f"there are two definitions of {name}")
        self._definitions[name] = _Definition(head.kind == "name", body[1:])

    def _import_names(self, head: LarkToken, text: str) -> None:
        found = _IMPORT.fullmatch(text)
        if found is None:
            raise self._refusal(head, "only terminals of common can be imported, as in %import common.WS")
        names = found["names"].split(",") if found["names"] else [found["name"]]
        self._imported.update({found["own"] or name: name for name in names})

    def _check_recursion(self) -> None:
        graph: dict[str, list[str]] = {}
        for name, (_, body) in self._definitions.items():
            graph[name] = []
            for token in body:
                if token.kind in ("name", "terminal"):
                    called = _rule_name(token) or token.text
                    if called not in self._definitions and called not in self._imported:
                        raise self._refusal(token, f"there is no rule or terminal {called}")
                    graph[name].append(called)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            why = "such a grammar can have no quotes, backslashes and control characters, which JSON writes otherwise"
            raise InvalidRequest(f"the rule {error.args[1][0]} calls itself; {why}", self._param) from None

    # ---- how it is written ----

    def _body(self, body: Sequence[LarkToken], *, has_ignored: bool = False) -> str:
        written: list[str] = []
        for token in body:
            if has_ignored and token.kind in _ATOMS:
                written.append(f"({self._text(token)} {_IGNORED})")
            elif (rule := _rule_name(token)) is not None:
                written.append(_terminal(rule))
            else:
                written.append(_CONVERTED.get(token.text, self._text(token)))
        return " ".join(written)

    def _text(self, token: LarkToken) -> str:
        """Returns what JSON writes of an atom; another token as it is."""
        match token.kind:
            case "string":
                text, is_folded = _decoded(token.text.removesuffix("i")), token.text.endswith("i")
                written = self._expression(token, patterns.literal(text), "i" if is_folded else "")
                return written if _WRITTEN_OTHERWISE.search(text) else token.text
            case "expression":
                body, _, flags = token.text[1:].rpartition("/")
                return self._expression(token, body, flags)
            case "special" | "directive":
                raise self._refusal(token, f"{token.text.split()[0]} is not possible in the text of a call")
        return token.text

    def _expression(self, token: LarkToken, body: str, flags: str) -> str:
        if "x" in flags:
            raise self._refusal(token, "the flag x is not possible in the text of a call; i, m and s are")
        try:
            return f"/{in_json(body, dot_all='s' in flags)}/{flags}"
        except UnsupportedExpression as error:
            raise self._refusal(token, str(error)) from None

    def _import(self, imported: tuple[str, str]) -> str:
        own, name = imported
        return f"{own}: /{in_json(COMMON[name])}/" if name in COMMON else f"%import common.{name} -> {own}"

    def _refusal(self, token: LarkToken, why: str) -> InvalidRequest:
        return InvalidRequest(f"line {token.line}: {why}", self._param)


def _statements(tokens: Sequence[LarkToken], refusal: Refusal) -> Iterator[list[LarkToken]]:
    """Splits a grammar where a line ends outside of brackets, and the next one does not go on with `|`.

    Raises the refusal of what is no statement.
    """
    statement: list[LarkToken] = []
    depth = 0
    parts = [token for token in tokens if token.kind != "space" or "\n" in token.text]
    at = 0
    while at < len(parts):
        token = parts[at]
        depth += (token.text in "([{") - (token.text in ")]}") if token.kind == "sign" else 0
        if token.kind != "space":
            at += _skipped(parts, at, statement, refusal)
            continue
        at += 1
        if statement and depth == 0 and not _is(parts, at, "|"):
            yield statement
            statement = []
    if statement:
        yield statement


def _skipped(parts: Sequence[LarkToken], at: int, statement: list[LarkToken], refusal: Refusal) -> int:
    """Adds the token here to the statement. Returns how many tokens were read: the name of a tree is left out, a range is one."""
    token = parts[at]
    if token.kind == "string" and _is(parts, at + 1, ".") and _is(parts, at + 2, "."):
        ends = [_decoded(end.text) if _is_plain(end) else "" for end in (token, *parts[at + 3 : at + 4])]
        if [len(end) for end in ends] != [1, 1]:
            raise refusal(token, 'a range has to have a string of one character at each end, as in "a".."z"')
        statement.append(LarkToken("expression", f"/[{'-'.join(map(patterns.literal, ends))}]/", token.line))
        return 4
    if token.text == "-" and _is(parts, at + 1, ">") and statement and statement[0].kind != "directive":
        return 3
    statement.append(token)
    return 1


def _is(tokens: Sequence[LarkToken], at: int, text: str) -> bool:
    return at < len(tokens) and tokens[at].text == text


def _is_plain(token: LarkToken) -> bool:
    """Says if a token is a string with the cases of its letters."""
    return token.kind == "string" and not token.text.endswith("i")


def _rule_name(token: LarkToken) -> str | None:
    return token.text.lstrip("!?") if token.kind == "name" else None


def _terminal(name: str) -> str:
    return name if name.isupper() else f"{_RULE}{name.upper()}"


def _decoded(string: str) -> str:
    """Returns the text of a string: one of JSON, in which numbers may have two digits."""
    text: str = json.loads(_ESCAPE.sub(lambda found: "\\u00" if found[0] == "\\x" else found[0], string))
    return text
