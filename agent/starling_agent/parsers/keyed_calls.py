"""Calls with a pair of tags around each argument, as XML has them. Values are text, or JSON where the tool's schema says so."""

import html
import json
import re
from dataclasses import dataclass
from typing import Any

from starling_agent.parsers.calls import end_call, read_object
from starling_agent.parsers.json_text import escaped
from starling_agent.parsers.reading import ReadCalls, Reading
from starling_agent.parsers.schemas import is_text, json_value, schema_of
from starling_agent.parsers.source import Markers, Reader, Sink

TEXT_TYPES = ("true", "string")
"""A tag's own words for a value that is text: `string="true"`, `type="string"`."""


@dataclass(frozen=True)
class KeyedFormat:
    """The tags of a format.

    parameter   what opens the tag of an argument
    key         an expression for what is in that tag, with a group `key` and possibly a group `type`
    key_ends    what ends that tag
    value_ends  the tag behind a value
    call_ends   the tag behind a call
    name        an expression for what is in the tag of a call, with a group `name`
    name_ends   what ends that tag; nothing where arguments or the end of the call follow at once
    lines       values stand on lines of their own, so that their ends are at the beginning of a line
    attributes  keys are written as XML's attributes
    """

    parameter: str
    key: str
    key_ends: str
    value_ends: str
    call_ends: str
    name: str = r"\s*(?P<name>[^\s<>]+)\s*"
    name_ends: str = ""
    lines: bool = False
    attributes: bool = False


def keyed_call(form: KeyedFormat, *, only_offered: bool = False) -> ReadCalls:
    """Returns the reader of a call, whose opening marker was read; with `only_offered` it has to be of an offered tool."""
    next_argument = Markers(form.parameter, form.call_ends)
    name_ends = Markers(form.name_ends) if form.name_ends else next_argument
    key_ends = Markers(form.key_ends)
    name_pattern, key_pattern = re.compile(form.name, re.DOTALL), re.compile(form.key, re.DOTALL)

    def read(reading: Reading, opening: str) -> Reader[None]:
        source, output = reading.source, reading.output
        source.keep()
        tag, marker = yield from source.text_until(name_ends)
        found = name_pattern.fullmatch(tag)
        if marker is None or found is None or (only_offered and found["name"] not in reading.tools):
            reading.give_back(opening)
            return
        source.kept()
        name = found["name"]
        output.begin_call(name)
        output.arguments("{")
        if form.name_ends:
            marker = form.call_ends if tag.endswith("/") else (yield from source.until(next_argument))
        keys: set[str] = set()
        while marker == form.parameter:
            tag, _ = yield from source.text_until(key_ends)
            if (found := key_pattern.fullmatch(tag)) is not None:
                key = html.unescape(found["key"]) if form.attributes else found["key"]
                schema = schema_of(reading.tools.get(name), key)
                kind = found.groupdict().get("type")
                as_text = is_text(schema) if kind is None else kind in TEXT_TYPES
                yield from _value(reading, form, schema, as_text, None if key in keys else key)
                keys.add(key)
            marker = yield from source.until(next_argument)
        if marker == form.call_ends:
            output.arguments("}")
        output.end_call()

    return read


def wrapped(call_opens: str, read_call: ReadCalls, closing: str) -> ReadCalls:
    """Returns the reader of one call within a pair of markers. Models that know both forms also write an object there."""

    def read(reading: Reading, opening: str) -> Reader[None]:
        source = reading.source
        source.keep()
        if (yield from source.next_character()) == "{" and (yield from read_object(reading)):
            yield from end_call(reading, closing)
        elif (yield from source.try_read(call_opens)):
            yield from read_call(reading, opening + source.kept())
            yield from source.next_character()
            yield from source.try_read(closing)
        else:
            reading.give_back(opening)

    return read


def _value(reading: Reading, form: KeyedFormat, schema: Any, as_text: bool, key: str | None) -> Reader[None]:
    """Reads a value up to its end, and writes it; drops it without a key, as of an argument that was there before."""
    source, output = reading.source, reading.output
    parts: list[str] = []
    sink: Sink = parts.append
    if key is not None:
        output.arguments(("" if output.arguments_are_empty else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if as_text:
            output.arguments('"')

            def sink(text: str) -> None:
                output.arguments(escaped(text))

    line = form.lines and (yield from source.try_read("\n"))
    if not line or not (yield from source.try_read(form.value_ends)):  # else an empty value
        yield from _value_text(reading, form, "\n" if line else "", sink)
    if key is not None and not (source.is_at_end and output.is_cut):
        output.arguments('"' if as_text else json_value("".join(parts), schema))


def _value_text(reading: Reading, form: KeyedFormat, line: str, sink: Sink) -> Reader[None]:
    """Reads the text of a value. Where its end was left out, the tag behind it ends it."""
    source = reading.source
    tags = (form.parameter, form.call_ends)
    last = [line + form.value_ends]
    others = [line + tag for tag in tags] if form.lines else [form.call_ends]
    if line:
        others += [f"{form.value_ends}\n{tag}" for tag in tags]
    ends = Markers(*last, *others)
    while (marker := (yield from source.until(ends, sink))) is not None:
        if marker in last:
            return
        # Elsewhere than at the beginning of a line a tag may be text, but not where it is the last that was written.
        if form.lines or (yield from source.next_character(skip_space=False)) == "":
            source.back(marker.removeprefix(line) if marker.startswith(line) else marker.removeprefix(form.value_ends))
            return
        sink(marker)
