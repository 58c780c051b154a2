"""Calls whose arguments are JSON: in an object together with the name, or behind it."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from starling_agent.parsers.events import Steady
from starling_agent.parsers.json_text import LITERAL, LITERAL_CHARACTERS, PYTHON_LITERALS, JsonScanner, decoded
from starling_agent.parsers.output import Output
from starling_agent.parsers.reading import ReadCalls, Reading
from starling_agent.parsers.source import Markers, Reader, Source

ARGUMENTS = ("arguments", "parameters")
"""Names that formats have for a call's arguments."""
CALL_KEYS = (*ARGUMENTS, "name", "type", "id")
"""Keys that an object has which is a call, though no marker says so."""


def section(opens: str, read_call: ReadCalls, closes: str) -> ReadCalls:
    """Returns the reader of calls that each begin with `opens`, up to `closes`. What else is between them is left out."""
    markers = Markers(opens, closes)

    def read(reading: Reading, _: str) -> Reader[None]:
        while (yield from reading.source.until(markers)) == opens:
            yield from read_call(reading, opens)
        reading.output.content.mark()

    return read


def tagged_object(closing: str) -> ReadCalls:
    """Returns the reader of a call such as `{"name": ..., "arguments": {...}}` between the opening marker and `closing`."""

    def read(reading: Reading, opening: str) -> Reader[None]:
        reading.source.keep()
        if (yield from read_object(reading)):
            yield from end_call(reading, closing)
        else:
            reading.give_back(opening)

    return read


def tagged_objects(closing: str) -> ReadCalls:
    """Returns the reader of a JSON list of calls between the opening marker and `closing`; or of one call alone."""

    def read(reading: Reading, opening: str) -> Reader[None]:
        source, output, calls = reading.source, reading.output, reading.output.calls
        source.keep()
        if (yield from source.next_character()) == "[":
            yield from _list(reading, opening)
            if output.calls > calls:
                yield from source.try_close(closing)
        elif (yield from read_object(reading)):
            yield from end_call(reading, closing)
        else:
            reading.give_back(opening)

    return read


def listed_objects(reading: Reading, opening: str) -> Reader[None]:
    """Reads calls as a JSON list of objects behind a marker."""
    reading.source.keep()
    yield from _list(reading, opening)


def _list(reading: Reading, opening: str) -> Reader[None]:
    """Reads a list of calls, whose `keep` the caller has begun."""
    source = reading.source
    if (yield from source.next_character()) != "[":
        reading.give_back(opening)
        return
    source.skip(1)
    while (character := (yield from source.next_character())) == "{":
        if not (yield from read_object(reading)):
            reading.give_back(opening)
            return
        reading.output.end_call()
        opening = ""
        source.keep()
        if (yield from source.next_character()) == ",":
            source.skip(1)
    source.skip(1 if character == "]" else 0)
    source.kept()


def leading_objects(reading: Reading) -> Reader[None]:
    """Reads calls of offered tools, with `;` between them, that no marker opens."""
    source = reading.source
    source.keep()
    while (yield from source.next_character()) == "{":
        if not (yield from read_object(reading, offered=reading.tools)):
            break
        reading.output.end_call()
        source.keep()
        if (yield from source.next_character()) == ";":
            source.skip(1)
    reading.give_back("")


def named_arguments(name: str, arguments: str, closing: str = "") -> ReadCalls:
    """Returns the reader of a call's head, a marker, and the JSON of its arguments.

    Args:
        name: an expression for the head, with a group `name` and possibly a group `id`.
        arguments: the marker in front of the arguments.
        closing: the marker behind the call, where there is one.
    """
    head_ends = Markers(arguments, *([closing] if closing else []))
    pattern = re.compile(name)

    def read(reading: Reading, opening: str) -> Reader[None]:
        source = reading.source
        source.keep()
        head, marker = yield from source.text_until(head_ends)
        found = pattern.fullmatch(head)
        if marker != arguments or found is None or (yield from source.next_character()) != "{":
            reading.give_back(opening)
            return
        source.kept()
        reading.output.begin_call(found["name"], found.groupdict().get("id"))
        yield from read_arguments(reading)
        yield from end_call(reading, closing)

    return read


def read_object(reading: Reading, offered: Collection[str] | None = None) -> Reader[bool]:
    """Reads the object of one call, whose `keep` the caller has begun. Returns False, with nothing written, for what is no call.

    A call begins as soon as its name and the beginning of its arguments are there. With `offered` its name is one of these.
    """
    source = reading.source
    if (yield from source.next_character()) != "{":
        return False
    source.skip(1)
    yield from source.next_character()
    values: dict[str, str] = {}
    while not (yield from source.try_read("}")):
        key = yield from _key(source, is_first=not values)
        if key is None or (offered is not None and key not in CALL_KEYS):
            return False
        name = _text(values.get("name"))
        if key in ARGUMENTS and name and (yield from source.next_character()) == "{":
            if offered is not None and name not in offered:
                return False
            source.kept()
            reading.output.begin_call(name, _text(values.get("id")))
            yield from read_arguments(reading)
            yield from _skip_object(reading)
            return True
        value = yield from read_value(source)
        if value is None:
            return False
        values[key] = value
        yield from source.next_character()
    return _write_call(reading, values, offered)


def _key(source: Source, *, is_first: bool) -> Reader[str | None]:
    """Reads a key of an object and its colon. Returns None for what is none."""
    if not is_first and (yield from source.try_read(",")):
        yield from source.next_character()
    key = (yield from read_value(source)) if (yield from source.next_character()) == '"' else None
    if key is None or (yield from source.next_character()) != ":":
        return None
    source.skip(1)
    return decoded(key)


def _write_call(reading: Reading, values: dict[str, str], offered: Collection[str] | None) -> bool:
    """Writes a call whose arguments came before its name, or in a text, or not at all. Returns False for what is no call."""
    name = _text(values.get("name"))
    found = next((values[key] for key in ARGUMENTS if key in values), "{}" if offered is None else None)
    arguments = _text(found) or found
    if not name or arguments is None or not arguments.lstrip().startswith("{") or (offered is not None and name not in offered):
        return False
    reading.source.kept()
    reading.output.begin_call(name, _text(values.get("id")))
    reading.output.arguments(arguments)
    return True


def _skip_object(reading: Reading) -> Reader[None]:
    """Reads what is behind the arguments in the object of a call, and braces too many at its end."""
    source, before = reading.source, ""
    while character := (yield from source.next_character()):
        if character in ",:":
            source.skip(1)
        elif character in '"{[':
            if (yield from read_value(source)) is None:
                return
        elif before != ":" or not (yield from _skip_literal(source)):
            break
        before = character
    while (yield from source.try_read("}")):
        pass


def _skip_literal(source: Source) -> Reader[bool]:
    """Reads a number or a constant if one comes next, and says if it did."""
    word = yield from source.word(LITERAL_CHARACTERS)
    if LITERAL.fullmatch(word) or word in PYTHON_LITERALS:
        return True
    source.back(word)
    return False


def read_arguments(reading: Reading) -> Reader[None]:
    """Reads the arguments of the open call up to the end of their JSON, or to what is none."""
    yield from reading.source.through(_JsonArguments(reading.output))


@dataclass(slots=True)
class _JsonArguments:
    """Passes on the arguments of the open call."""

    output: Output

    def take(self, text: str) -> tuple[int, bool]:
        taken, scanner = self.output.arguments(text), self.output.open_call
        return taken, scanner is not None and not (scanner.is_done or scanner.is_broken)

    def steady(self) -> Steady | None:
        return self.output.steady_arguments()


def end_call(reading: Reading, closing: str) -> Reader[None]:
    """Reads up to the marker that closes a call, and ends it. Where the arguments are whole, a missing marker costs nothing."""
    source, scanner = reading.source, reading.output.open_call
    if closing and scanner is not None:
        if scanner.is_done:
            yield from source.try_close(closing)
        else:
            yield from source.until(Markers(closing))
    reading.output.end_call()


def read_value(source: Source) -> Reader[str | None]:
    """Reads a JSON value that has an end of its own. Returns it as valid JSON; None for what is none."""
    scanner, parts = JsonScanner(), []
    while not (scanner.is_done or scanner.is_broken):
        chunk = yield from source.chunk()
        if not chunk:
            return None
        taken, written = scanner.feed(chunk)
        source.skip(taken)
        parts.append(written)
    return None if scanner.is_broken else "".join(parts).strip()


def _text(value: str | None) -> str | None:
    """Returns the text that a JSON string stands for; None for other values."""
    return decoded(value) if value is not None and value.startswith('"') else None
