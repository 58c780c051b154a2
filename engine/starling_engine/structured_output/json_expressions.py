r"""Expressions of a text, in the syntax of Rust's regex crate, as expressions of what JSON writes of it between two quotes.

JSON writes a quote, a backslash and a line's end as two characters each. A control character without an escape of one letter is
matched by nothing, as in the strings of schemas.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

Members = frozenset[str]
"""Characters of a set that JSON does not write as they are."""

_LETTERS = {'"': '"', "\\": "\\\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Expressions for what JSON has behind the backslash."""
_CONTROLS = frozenset(map(chr, range(0x20)))
_ALL = _CONTROLS | set(_LETTERS)
_PLAIN = r"[^\"\\\x00-\x1f]"
_SPACE = frozenset("\t\n\v\f\r")
_SETS = {"d": Members(), "w": Members(), "s": _SPACE}
_POSIX = {
    "ascii": _ALL,
    "blank": frozenset("\t"),
    "cntrl": _CONTROLS,
    "graph": frozenset('"\\'),
    "print": frozenset('"\\'),
    "punct": frozenset('"\\'),
    "space": _SPACE,
    **dict.fromkeys(("alnum", "alpha", "digit", "lower", "upper", "word", "xdigit"), Members()),
}
_ESCAPES = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_NUMBERED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\})")
_SET = re.compile(r"\\(?:(?P<set>[dws])|(?P<all_but>[DWS])|(?P<sign>[pP])(?:(?P<letter>[A-Z])|\{(?P<category>[A-Z][a-z]?)\}))")
_ANCHOR = re.compile(r"\\[AzbB<>]")
_GROUP = re.compile(r"\((?:\?(?:P?<[A-Za-z_][\w.\[\]]*>|(?P<flags>[A-Za-z]*(?:-[A-Za-z]+)?)(?P<end>[:)])))?")
_POSIX_CLASS = re.compile(r"\[:(?P<not>\^?)(?P<name>[a-z]+):\]")
_OPERATION = re.compile("&&|--|~~")
_HYPHENS = re.compile("-+")
_FLAGS = frozenset("imsU-")


class UnsupportedExpression(ValueError):
    """An expression that cannot be written for JSON; the message says why."""


def in_json(regex: str, *, dot_all: bool = False) -> str:
    """Returns the expression of what JSON writes of matched texts. `dot_all`: a dot matches line ends, too.

    Raises `UnsupportedExpression`. What the library refuses itself, such as an anchor in the middle, stays as it is.
    """
    try:
        return "".join(_Writer(regex, dot_all).parts())
    except IndexError:
        raise UnsupportedExpression("the expression ends in the middle") from None
    except RecursionError:
        raise UnsupportedExpression("the expression nests classes too deeply") from None


class _Writer:
    """Reads an expression from left to right."""

    def __init__(self, regex: str, dot_all: bool) -> None:
        self._text = regex
        self._at = 0
        self._dot_all = dot_all

    def parts(self) -> Iterator[str]:
        outer: list[bool] = []
        """Says of each open group if dots outside of it match line ends."""
        while self._at < len(self._text):
            begin = self._at
            match self._text[begin]:
                case "(":
                    outer.append(self._dot_all)
                    if self._opens_flags():
                        outer.pop()
                    yield self._text[begin : self._at]
                case ")":
                    if not outer:
                        raise UnsupportedExpression("the expression has an unmatched bracket")
                    self._dot_all = outer.pop()
                    yield self._take()
                case ".":
                    self._at += 1
                    yield _either(_PLAIN, _ALL if self._dot_all else _ALL - {"\n"})
                case "[":
                    members = self._class()
                    yield _set(members, self._text[begin : self._at])
                case "\\" if anchor := _ANCHOR.match(self._text, begin):
                    self._at = anchor.end()
                    yield anchor[0]
                case _:
                    members, character = self._item()
                    text = self._text[begin : self._at]
                    yield _set(members, text) if character is None else _one(character, text)

    def _take(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _taken(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
        return found

    def _opens_flags(self) -> bool:
        """Reads the beginning of a group. Returns whether it is one: flags alone are none."""
        found = self._taken(_GROUP)
        assert found is not None
        if found["flags"] is None:
            if self._text.startswith("?", self._at):
                raise UnsupportedExpression("the expression looks ahead or behind")
            return False
        if unknown := set(found["flags"]) - _FLAGS:
            raise UnsupportedExpression(f"the expression has the flag {min(unknown)}; i, m, s and U are possible")
        on, _, off = found["flags"].partition("-")
        self._dot_all = (self._dot_all or "s" in on) and "s" not in off
        return found["end"] == ")"

    def _item(self) -> tuple[Members, str | None]:
        """Reads a character, or an escape. Returns what it has, and the character if it is one."""
        if not self._text.startswith("\\", self._at):
            character = self._take()
            return _ALL & {character}, character
        if found := self._taken(_SET):
            return _members(found), None
        if found := self._taken(_NUMBERED):
            code = int(next(digits for digits in found.groups() if digits), 16)
            if code > sys.maxunicode:
                raise UnsupportedExpression(f"{found[0]} is no character")
            character = chr(code)
        else:
            self._at += 1
            name = self._take()
            if name.isalnum() and name not in _ESCAPES:
                raise UnsupportedExpression(f"\\{name} is not possible here; properties are, by one letter or two (\\p{{Lu}})")
            character = _ESCAPES.get(name, name)
        return _ALL & {character}, character

    def _class(self) -> Members:
        """Reads a class. A bracket or hyphens that come first are its characters."""
        self._at += 1
        is_negated = self._text[self._at] == "^"
        self._at += is_negated
        members, operation, left = Members(), "", Members()
        is_first = not self._taken(_HYPHENS)
        while is_first or self._text[self._at] != "]":
            if found := self._taken(_OPERATION):
                left, members, operation = _combined(operation, left, members), Members(), found[0]
            else:
                members |= self._class_part()
            is_first = False
        self._at += 1
        members = _combined(operation, left, members)
        return _ALL - members if is_negated else members

    def _class_part(self) -> Members:
        """Reads a nested class, or an item, or a range of characters."""
        if found := self._taken(_POSIX_CLASS):
            if found["name"] not in _POSIX:
                raise UnsupportedExpression(f"there is no class {found[0]}")
            return _ALL - _POSIX[found["name"]] if found["not"] else _POSIX[found["name"]]
        if self._text[self._at] == "[":
            return self._class()
        members, first = self._item()
        following = self._text[self._at : self._at + 2]
        if first is None or following[:1] != "-" or following in ("-]", "--"):
            return members
        self._at += 1
        _, last = self._item()
        if last is None:
            raise UnsupportedExpression("a range ends with a set")
        return frozenset(one for one in _ALL if first <= one <= last)


def _members(found: re.Match[str]) -> Members:
    """Returns what a set has that an escape names. Of categories only those of quotes and of control characters have any."""
    if name := found["set"]:
        return _SETS[name]
    if name := found["all_but"]:
        return _ALL - _SETS[name.lower()]
    category = found["letter"] or found["category"]
    members = frozenset(one for one in _ALL if unicodedata.category(one).startswith(category))
    return _ALL - members if found["sign"] == "P" else members


def _combined(operation: str, left: Members, right: Members) -> Members:
    match operation:
        case "&&":
            return left & right
        case "--":
            return left - right
        case "~~":
            return left ^ right
    return right


def _set(members: Members, text: str) -> str:
    return _either(f"[[{text}]&&{_PLAIN}]", members) if members else text


def _either(plain: str, members: Members) -> str:
    """Returns the expression of a set's characters: those that JSON writes as they are, and escapes of the others."""
    letters = "".join(letter for character, letter in _LETTERS.items() if character in members)
    return f"(?:{plain}|{_escape(f'[{letters}]')})" if letters else plain


def _one(character: str, text: str) -> str:
    if character not in _ALL:
        return text
    if character not in _LETTERS:
        raise UnsupportedExpression(f"the character {character!r} cannot be written in JSON with an escape of one letter")
    return _escape(_LETTERS[character])


def _escape(letters: str) -> str:
    # Escapes are written with small letters, whatever the expression's flags are.
    return rf"(?-i:\\{letters})"
