"""Calls as Python writes them: `[f(a=1, b='x'), g()]`. Nothing is evaluated: values are constants, and parsed as such."""

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

from starling_agent.parsers.json_text import is_whole_json
from starling_agent.parsers.reading import ReadCalls, Reading
from starling_agent.parsers.source import Reader, Source

NAME = re.compile(r"[A-Za-z_][\w.\-]*")
"""Names of tools and of arguments; tools of other servers have hyphens, too."""


def python_calls(closing: str) -> ReadCalls:
    """Returns the reader of a list of calls behind a marker and before `closing`."""

    def read(reading: Reading, opening: str) -> Reader[None]:
        yield from _list(reading, opening)
        yield from reading.source.try_close(closing)

    return read


def leading_python_calls(reading: Reading) -> Reader[None]:
    """Reads a list of calls of offered tools, that no marker opens."""
    yield from _list(reading, "", offered=reading.tools)


def _list(reading: Reading, opening: str, offered: Collection[str] | None = None) -> Reader[None]:
    source, output = reading.source, reading.output
    source.keep()
    separator = "["
    while (yield from source.next_character()) == separator:
        source.skip(1)
        yield from source.next_character()
        name = yield from source.word(NAME)
        is_offered = bool(name) and (offered is None or name in offered)
        if not is_offered or not (yield from source.try_read("(")):
            break
        source.kept()
        output.begin_call(name)
        output.arguments("{")
        if (yield from _arguments(reading)):
            output.arguments("}")
        output.end_call()
        source.keep()
        opening, separator = "", ","
    if separator == "," and (yield from source.try_read("]")):
        source.kept()
    else:
        reading.give_back(opening)


def _arguments(reading: Reading) -> Reader[bool]:
    """Reads `a=1, b='x')`. Returns False where the call does not go on so."""
    source, output = reading.source, reading.output
    keys: set[str] = set()
    while not (yield from source.try_read(")")):
        key = yield from source.word(NAME)
        yield from source.next_character()
        value = (yield from _value(source)) if key and (yield from source.try_read("=")) else None
        if value is None:
            return False
        if key not in keys:
            output.arguments(f"{', ' if keys else ''}{json.dumps(key)}: {value}")
        keys.add(key)
        if (yield from source.next_character()) == ",":
            source.skip(1)
            yield from source.next_character()
    return True


def _value(source: Source) -> Reader[str | None]:
    """Reads a constant up to the comma or bracket behind it. Returns it as JSON; None for what is no constant."""
    scanner, parts = _ConstantScanner(), []
    while (chunk := (yield from source.chunk())) and not scanner.is_done:
        taken = scanner.feed(chunk)
        parts.append(chunk[:taken])
        source.skip(taken)
    return _as_json("".join(parts)) if scanner.is_done else None


class _ConstantScanner:
    """Finds what ends a constant: a comma or a closing bracket that is in none of its strings and brackets."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Returns how many characters belong to the constant."""
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in "'\"":
                self._quote = character
            elif character in ",)" and self._depth == 0:
                self.is_done = True
                return at
            else:
                self._depth += (character in "([{") - (character in ")]}")
        return len(text)


def _as_json(text: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are none
            value: Any = ast.literal_eval(text.strip())
        return json.dumps(list(value) if isinstance(value, set) else value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text.strip() if is_whole_json(text.strip()) else None
