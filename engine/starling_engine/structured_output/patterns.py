"""Patterns of JSON Schema (ECMA-262) in the words of the library's expressions, which are those of Rust's regex crate.

Few constructs are read differently by both, and these are spelled out: `.`, `\\s`, `\\d`, `\\w`, classes, literal braces.
A character that only some dialects count as white space is matched by neither `\\s` nor `\\S`.
Control characters without an escape of one letter are taken out of all sets, because the grammar does not write them.
The library would take one that stands alone for nothing at all, and so accept strings without it.
https://tc39.es/ecma262/#sec-patterns
"""

import re
from collections.abc import Iterable

MAX_LENGTH = 2_000
"""Characters of one pattern: the library's time grows with their square."""
MAX_REPEATS = 10_000
MAX_DEPTH = 50

_WHITE = r"\t\n\x0b\x0c\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": _WHITE}
_NEGATED_SETS = {"D": "0-9", "W": "0-9A-Za-z_", "S": _WHITE + r"\u{85}\u{feff}"}
_ANY = r"\u{0}-\u{10ffff}"
_UNWRITABLE = r"\u{0}-\u{7}\u{b}\u{e}-\u{1f}\u{7f}"
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(?:(,)(\d*))?\}", re.ASCII)
_NUMBERED = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|c([A-Za-z])|(0)(?![0-9])", re.ASCII)
_PROPERTY = re.compile(r"([pP])\{(\w+(?:=\w+)?)\}", re.ASCII)
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)", re.ASCII)


class UnsupportedPattern(ValueError):
    """A pattern that the library cannot match as ECMA-262 says; the message says why."""


def translate(pattern: str) -> str:
    """Returns the library's expression for the same strings. Raises `UnsupportedPattern`."""
    if len(pattern) > MAX_LENGTH:
        raise UnsupportedPattern(f"has {len(pattern)} characters; {MAX_LENGTH} are possible")
    return _Translator(pattern).alternatives(0, True)


def literal(text: str) -> str:
    """Returns an expression for exactly this text, to be put into another one."""
    return "".join(_escaped(ord(character)) for character in text)


def all_but(words: Iterable[str]) -> str:
    """Returns a pattern of ECMA-262 for every string that is none of the words."""
    return f"^(?:{_rest(sorted(set(words)), 0)})$"


def _rest(words: list[str], start: int) -> str:
    """Says what may follow a prefix that the words share: each branch leaves all of them, or goes on with some."""
    ended = any(len(word) == start for word in words)
    following: dict[str, list[str]] = {}
    for word in words:
        if len(word) > start:
            following.setdefault(word[start], []).append(word)
    others = "".join(_escaped(ord(character)) for character in following)
    leaves = f"[^{others}][\\s\\S]*" if others else "[\\s\\S]+"
    goes_on = [f"{_escaped(ord(character))}(?:{_rest(longer, start + 1)})" for character, longer in following.items()]
    return "|".join([*([] if ended else [""]), leaves, *goes_on])


def is_writable(text: str) -> bool:
    """Returns whether the grammar can write all characters of a string."""
    return not re.search(r"[\x00-\x07\x0b\x0e-\x1f\x7f]", text)


def _written(items: str, negation: str = "") -> str:
    """A class of those characters of a set that the grammar can write."""
    return f"[[{negation}{items}]&&[^{_UNWRITABLE}]]"


def _escaped(code: int) -> str:
    """One character, in a class or outside: written as its number unless it is a letter or a digit."""
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:x}}}"


class _Translator:
    """Reads a pattern from left to right, once, and writes the library's expression for each part."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._ended = False
        """Set when `$` has been read, so that nothing can follow on this branch."""
        self._begun = False
        """Set when something was read on this branch, so that `^` can no longer stand here."""
        self._anchors = 0

    def alternatives(self, depth: int, at_start: bool) -> str:
        """Reads up to the closing bracket, or to the end at depth 0."""
        if depth > MAX_DEPTH:
            raise UnsupportedPattern(f"nests groups more than {MAX_DEPTH} deep")
        parts: list[str] = []
        ended, self._begun = False, not at_start
        while self._at < len(self._text) and self._next() != ")":
            if self._take("|"):
                parts.append("|")
                ended, self._ended, self._begun = ended or self._ended, False, not at_start
            else:
                parts.append(self._term(depth))
        if (self._at < len(self._text)) != (depth > 0):
            raise UnsupportedPattern("has an unmatched bracket")
        self._ended = ended or self._ended
        return "".join(parts)

    def _term(self, depth: int) -> str:
        if self._take("^"):
            return self._anchor("^", self._begun)
        if self._take("$"):
            anchor = self._anchor("$", False)
            self._ended = True
            return anchor
        if self._ended:
            raise UnsupportedPattern("has something after $, which can only end a pattern")
        anchors = self._anchors
        atom = self._group(depth) if self._next() == "(" else self._atom()
        self._begun = True
        quantifier = self._quantifier()
        if quantifier and self._anchors > anchors:
            raise UnsupportedPattern("repeats a group with ^ or $")
        return atom + quantifier

    def _anchor(self, anchor: str, is_misplaced: bool) -> str:
        if is_misplaced:
            raise UnsupportedPattern("has ^ after something; it can only begin a pattern")
        if self._quantifier():
            raise UnsupportedPattern(f"repeats {anchor}")
        self._anchors += 1
        return anchor

    def _group(self, depth: int) -> str:
        opening = _GROUP.match(self._text, self._at)
        if opening is None and self._text.startswith("(?", self._at):
            raise UnsupportedPattern("looks ahead or behind, or has flags; that is not possible")
        self._at = opening.end() if opening else self._at + 1
        inner = self.alternatives(depth + 1, not self._begun)
        self._at += 1
        return f"(?:{inner})"

    def _atom(self) -> str:
        if _QUANTIFIER.match(self._text, self._at):
            raise UnsupportedPattern("repeats nothing")
        character = self._character()
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escape()
        if character == ".":
            return _written(r"\n\r\u{2028}\u{2029}", "^")
        return self._literal(ord(character))

    def _literal(self, code: int) -> str:
        return _escaped(code) if is_writable(chr(code)) else _written(_escaped(code))

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        self._take("?")  # Lazy or not, the same strings match.
        if _QUANTIFIER.match(self._text, self._at):
            raise UnsupportedPattern("repeats a repetition")
        counts = [int(count) for count in found.group(1, 3) if count]
        if any(count > MAX_REPEATS for count in counts) or counts != sorted(counts):
            raise UnsupportedPattern(f"repeats {found.group()} times; bounds go up, to {MAX_REPEATS} at most")
        return found.group()

    def _escape(self) -> str:
        character = self._next()
        if character in _SETS or character in _NEGATED_SETS or character in "pP":
            return _written(self._set())
        return self._literal(self._escaped_code())

    def _set(self) -> str:
        """A set of characters that an escape names, as it stands in a class."""
        found = _PROPERTY.match(self._text, self._at)
        if found:
            self._at = found.end()
            return f"\\{found.group(1)}{{{found.group(2)}}}"
        character = self._character()
        if character in _SETS:
            return _SETS[character]
        if character in _NEGATED_SETS:
            return f"[^{_NEGATED_SETS[character]}]"
        raise UnsupportedPattern("has \\p without the name of a property")

    def _escaped_code(self) -> int:
        """The one character that an escape means."""
        found = _NUMBERED.match(self._text, self._at)
        if found:
            self._at = found.end()
            two, four, braced, control, _ = found.groups()
            code = ord(control) % 32 if control else int(two or four or braced or "0", 16)
            return self._scalar(code)
        character = self._character()
        if character in _CONTROLS:
            return _CONTROLS[character]
        if not character.isascii() or character.isalnum():
            raise UnsupportedPattern(f"has \\{character}, which is not possible")
        return ord(character)

    def _scalar(self, code: int) -> int:
        if 0xD800 <= code < 0xDC00 and (low := re.compile(r"\\u(D[C-F][0-9A-F]{2})", re.IGNORECASE).match(self._text, self._at)):
            self._at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low.group(1), 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise UnsupportedPattern("has a number that is no character")
        return code

    def _class(self) -> str:
        negation = "^" if self._take("^") else ""
        items: list[str] = []
        sets: set[str] = set()
        while not self._take("]"):
            items.append(self._class_item(sets))
        if not items:
            return _written(_ANY, "" if negation else "^")
        if any({name, name.upper()} <= sets for name in _SETS):
            items = [_ANY]
        return _written("".join(items), negation)

    def _class_item(self, sets: set[str]) -> str:
        if self._starts_set():
            sets.add(self._text[self._at + 1])
            self._at += 1
            return self._set()
        first = self._class_code()
        if self._next() != "-" or self._text[self._at + 1 : self._at + 2] in ("", "]"):
            return _escaped(first)
        self._at += 1
        if self._starts_set():
            return _escaped(first) + _escaped(ord("-"))
        last = self._class_code()
        if last < first:
            raise UnsupportedPattern("has a class with a range that goes down")
        return f"{_escaped(first)}-{_escaped(last)}"

    def _starts_set(self) -> bool:
        following = self._text[self._at : self._at + 2]
        return len(following) == 2 and following[0] == "\\" and following[1] in "dDwWsSpP"

    def _class_code(self) -> int:
        if not self._take("\\"):
            return ord(self._character())
        return 0x08 if self._take("b") else self._escaped_code()

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, character: str) -> bool:
        is_next = self._next() == character
        self._at += is_next
        return is_next

    def _character(self) -> str:
        if self._at >= len(self._text):
            raise UnsupportedPattern("ends in the middle")
        self._at += 1
        return self._text[self._at - 1]
