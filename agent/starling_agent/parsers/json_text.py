"""JSON as it comes: where a value ends, and how it is written so that every client can parse it."""

import json
import re

LITERAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Constants that models trained on Python write in JSON."""
LONGEST_LITERAL = 1024
"""Characters; longer numbers are no numbers to any client."""
LITERAL_CHARACTERS = re.compile(r"[-+.\w]+")
_STRING_CHARACTERS = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
STRING_PIECE = re.compile(r'[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+')
"""Matches what a string may have within it, escapes included."""
_ESCAPE_BEGINNING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_CLOSING = {"{": "}", "[": "]"}


def escaped(text: str) -> str:
    """Returns a piece of a text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> str:
    """Returns what a JSON string stands for, as `valid_text`."""
    return valid_text(json.loads(text))


def valid_text(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON can spell and no text may have."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def literal(text: str) -> str | None:
    """Returns a constant or number as JSON has it; None for what is neither."""
    text = PYTHON_LITERALS.get(text, text)
    return text if LITERAL.fullmatch(text) else None


def is_whole_json(text: str) -> bool:
    """Says if a text is one JSON value, from beginning to end."""
    scanner = JsonScanner()
    taken, _ = scanner.feed(text)
    return scanner.is_done and taken == len(text)


def whole_json(text: str) -> str:
    """Returns JSON that was cut with what is missing at its end; other text as it is."""
    scanner = JsonScanner()
    taken, written = scanner.feed(text)
    return written + scanner.rest() if taken == len(text) and not (scanner.is_done or scanner.is_broken) else text


class JsonScanner:
    """Finds the end of one value, in pieces, and writes it as valid JSON.

    Line ends and tabs within strings are escaped, and Python's constants become JSON's. At anything else that is no JSON the value
    is broken; `rest` makes it whole.

    is_done    the value is complete
    is_broken  what came last is no JSON
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []
        self._in_string = False
        self._is_key = False
        self._wants = "value"
        """Says what may come: value, first (value, or the end of a list), key, first_key (likewise), colon or comma."""
        self._comma: list[str] = []
        """A comma and the space behind it, which are written with what follows: none may be last."""
        self._pending = ""
        """The beginning of a constant, a number or an escape, whose end is not there yet."""

    @property
    def is_empty_object(self) -> bool:
        """True if nothing was written but the opening of an object."""
        return self._wants == "first_key"

    @property
    def is_in_string(self) -> bool:
        """True within a string, unless an escape has begun in it: what STRING_PIECE matches is written as it comes."""
        return self._in_string and not self._pending

    def feed(self, text: str) -> tuple[int, str]:
        """Takes text up to the end of the value. Returns how many characters it took, and the JSON to write for them."""
        if self.is_in_string and STRING_PIECE.fullmatch(text):  # most of long arguments
            return len(text), text
        held = len(self._pending)
        text = self._pending + text
        self._pending = ""
        out: list[str] = []
        at = 0
        while at < len(text) and not (self.is_done or self.is_broken or self._pending):
            at = self._string(text, at, out) if self._in_string else self._between_strings(text, at, out)
        # What waited and turns out to be no JSON was taken before.
        return max(0, at + len(self._pending) - held), "".join(out)

    def rest(self) -> str:
        """Returns what makes a value whole that was cut or is broken."""
        if self.is_done:
            return ""
        if self._in_string:
            out = '": null' if self._is_key else '"'
        elif self._wants == "colon":
            out = ": null"
        elif (found := literal(self._pending)) is not None:
            out = "".join((*self._comma, found))
        else:
            out = "null" if self._wants == "value" and not self._comma else ""
        self._in_string, self._pending = False, ""
        while self._open:
            out += _CLOSING[self._open.pop()]
        self.is_done = True
        return out

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if match := _STRING_CHARACTERS.match(text, at):
            out.append(match.group())
            return match.end()
        if text[at] == '"':
            out.append('"')
            self._in_string = False
            self._after_string()
            return at + 1
        if text[at] != "\\":
            out.append(escaped(text[at]))
            return at + 1
        if match := _ESCAPE.match(text, at):
            out.append(match.group())
            return match.end()
        if _ESCAPE_BEGINNING.fullmatch(text, at):
            self._pending = text[at:]
            return at
        out.append("\\\\")  # a backslash that escapes nothing, as in a path
        return at + 1

    def _between_strings(self, text: str, at: int, out: list[str]) -> int:
        if match := _SPACE.match(text, at):
            (self._comma or out).append(match.group())
            return match.end()
        character = text[at]
        if character in "{[":
            return self._begin(character, at, out)
        if character in "}]":
            return self._close(character, at, out)
        if character == '"':
            return self._begin_string(at, out)
        if character == "," and self._wants == "comma" and self._open:
            self._comma = [","]
            self._wants = "key" if self._open[-1] == "{" else "value"
            return at + 1
        if character == ":" and self._wants == "colon":
            out.append(":")
            self._wants = "value"
            return at + 1
        return self._constant(text, at, out)

    def _begin(self, character: str, at: int, out: list[str]) -> int:
        if self._wants not in ("value", "first"):
            return self._break(at)
        self._write(character, out)
        self._open.append(character)
        self._wants = "first_key" if character == "{" else "first"
        return at + 1

    def _close(self, character: str, at: int, out: list[str]) -> int:
        # A comma before the end is left out.
        fits = bool(self._open) and _CLOSING[self._open[-1]] == character
        if not fits or not (self._wants in ("comma", "first", "first_key") or self._comma):
            return self._break(at)
        self._comma = []
        out.append(character)
        self._open.pop()
        self._after_value()
        return at + 1

    def _begin_string(self, at: int, out: list[str]) -> int:
        if self._wants not in ("value", "first", "key", "first_key"):
            return self._break(at)
        self._is_key = self._wants in ("key", "first_key")
        self._write('"', out)
        self._in_string = True
        return at + 1

    def _after_string(self) -> None:
        if self._is_key:
            self._wants = "colon"
        else:
            self._after_value()

    def _after_value(self) -> None:
        self._wants = "comma"
        self.is_done = not self._open

    def _constant(self, text: str, at: int, out: list[str]) -> int:
        match = LITERAL_CHARACTERS.match(text, at)
        if match is None or self._wants not in ("value", "first"):
            return self._break(at)
        if len(match.group()) > LONGEST_LITERAL:
            return self._break(at + LONGEST_LITERAL + 1)
        if match.end() == len(text):
            self._pending = text[at:]
            return at
        found = literal(match.group())
        if found is None:
            return self._break(match.end())  # all of it, since its beginning may have been taken before
        self._write(found, out)
        self._after_value()
        return match.end()

    def _write(self, text: str, out: list[str]) -> None:
        """Writes what begins a value or a key, behind its comma."""
        out += (*self._comma, text)
        self._comma = []

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at
