"""Calls with a pair of tags around each argument, as XML has them. Values are text, or JSON where the tool's schema says so."""

import html
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from starling_agent.parsers.calls import end_call, read_object
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

    @cached_property
    def next_argument(self) -> Markers:
        return Markers(self.parameter, self.call_ends)

    @cached_property
    def name_markers(self) -> Markers:
        return Markers(self.name_ends) if self.name_ends else self.next_argument

    @cached_property
    def key_markers(self) -> Markers:
        return Markers(self.key_ends)

    @cached_property
    def value_markers(self) -> Markers:
        """Ends of a value that begins where its tag ends. A tag that was left out is missed only in a format with lines."""
        return Markers(self.value_ends, *([self.parameter] if self.lines else []), self.call_ends)

    @cached_property
    def line_markers(self) -> Markers:
        """Ends of a value on lines of its own; the last ones of its last line were not written at the beginning of one."""
        tags = (self.parameter, self.call_ends)
        return Markers(f"\n{self.value_ends}", *(f"\n{tag}" for tag in tags), *(f"{self.value_ends}\n{tag}" for tag in tags))

    def name_in(self, tag: str) -> str | None:
        """Returns the tool's name in the tag of a call, if it is one."""
        found = re.fullmatch(self.name, tag, re.DOTALL)
        return None if found is None else found["name"]

    def argument_in(self, tag: str, parameters: Any) -> "KeyedArgument | None":
        """Returns what the tag of an argument says of it, if it is one. `parameters` is the tool's schema."""
        found = re.fullmatch(self.key, tag, re.DOTALL)
        if found is None:
            return None
        key = html.unescape(found["key"]) if self.attributes else found["key"].strip()
        schema, kind = schema_of(parameters, key), found.groupdict().get("type")
        return KeyedArgument(key, schema, is_text(schema) if kind is None else kind in TEXT_TYPES)


class KeyedArgument(NamedTuple):
    """An argument whose value follows."""

    key: str
    schema: Any
    is_text: bool


def keyed_call(form: KeyedFormat, *, only_offered: bool = False) -> ReadCalls:
    """Returns the reader of a call, whose opening marker was read; with `only_offered` it has to be of an offered tool."""

    def read(reading: Reading, opening: str) -> Reader[None]:
        source, output = reading.source, reading.output
        source.keep()
        tag, marker = yield from source.text_until(form.name_markers)
        name = form.name_in(tag)
        if marker is None or name is None or (only_offered and name not in reading.tools):
            reading.give_back(opening)
            return
        source.kept()
        output.begin_call(name)
        output.arguments("{")
        if form.name_ends:
            marker = form.call_ends if tag.endswith("/") else (yield from source.until(form.next_argument))
        yield from _arguments(reading, form, name, marker)
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
            yield from source.try_close(closing)
        else:
            reading.give_back(opening)

    return read


def _arguments(reading: Reading, form: KeyedFormat, name: str, marker: str | None) -> Reader[None]:
    """Reads arguments up to the end of the call. Of one that is there twice the first counts."""
    source = reading.source
    keys: set[str] = set()
    while marker == form.parameter:
        tag, _ = yield from source.text_until(form.key_markers)
        argument = form.argument_in(tag, reading.tools.get(name))
        if argument is not None and argument.key not in keys:
            keys.add(argument.key)
            yield from _written_value(reading, form, argument)
        elif argument is not None:
            yield from _value(reading, form, lambda _: None)
        marker = yield from source.until(form.next_argument)
    if marker == form.call_ends:
        reading.output.arguments("}")


def _written_value(reading: Reading, form: KeyedFormat, argument: KeyedArgument) -> Reader[None]:
    """Reads a value, and writes it with its key as JSON."""
    output = reading.output
    parts: list[str] = []
    key = json.dumps(argument.key, ensure_ascii=False)
    quote = '"' if argument.is_text else ""
    output.arguments(f"{'' if output.arguments_are_empty else ', '}{key}: {quote}")
    yield from _value(reading, form, output.text_argument if argument.is_text else parts.append)
    if not (reading.source.is_at_end and output.is_cut):
        output.arguments(quote or json_value("".join(parts), argument.schema))


def _value(reading: Reading, form: KeyedFormat, sink: Sink) -> Reader[None]:
    """Reads the text of a value. Where its end was left out, the tag behind it ends it."""
    source = reading.source
    on_lines = form.lines and (yield from source.try_read("\n"))
    if on_lines and (yield from source.try_read(form.value_ends)):
        return
    markers = form.line_markers if on_lines else form.value_markers
    while (marker := (yield from source.until(markers, sink))) is not None:
        if marker.removeprefix("\n") == form.value_ends:
            return
        # Elsewhere than at the beginning of a line a tag may be text, but not where it is the last that was written.
        if form.lines or (yield from source.next_character(skip_space=False)) == "":
            source.back(marker.removeprefix("\n") if marker.startswith("\n") else marker.removeprefix(form.value_ends))
            return
        sink(marker)
