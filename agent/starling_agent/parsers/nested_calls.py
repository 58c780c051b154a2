"""MiniMax M3's calls: an element for each argument, with elements in it where it is an object or a list.

A mark stands before each tag, so that what looks like one is text.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from starling_agent.parsers.output import Output
from starling_agent.parsers.reading import Reading
from starling_agent.parsers.schemas import is_text, json_value, resolved, schema_of, types_of
from starling_agent.parsers.source import Markers, Reader, Sink

MARK = "]<]minimax[>["
_OPENS = f"{MARK}<"
_TAG, _TAG_ENDS = Markers(_OPENS), Markers(">", _OPENS)
_INVOKE = re.compile('invoke name="(?P<name>[^"]+)"')
_INVOKES, _CALL_ENDS, _SECTION_ENDS = 'invoke name="', "/invoke", "/tool_call"
_ITEM = "item"


@dataclass
class _Container:
    """An object or a list whose elements follow.

    schema      its schema, with definitions; None where nothing is known
    closing     the bracket that ends it
    keys        those of the elements so far
    is_written  what is in it is written; it is not where its key was there before
    """

    schema: Any
    closing: str
    keys: set[str] = field(default_factory=set)
    has_elements: bool = False
    is_written: bool = True

    def schema_of(self, key: str) -> Any:
        """Returns the schema of an element."""
        if self.closing == "}":
            return schema_of(self.schema, key)
        items = self.schema.get("items") if isinstance(self.schema, dict) else None
        return schema_of({**self.schema, "properties": {_ITEM: items}}, _ITEM) if isinstance(items, dict) else None

    def begin(self, key: str) -> str | None:
        """Returns what to write before an element; None where it is not to be written."""
        if not self.is_written or (self.closing == "}" and key in self.keys):
            return None
        separator, self.has_elements = ", " if self.has_elements else "", True
        if self.closing == "]":
            return separator
        self.keys.add(key)
        return f"{separator}{json.dumps(key, ensure_ascii=False)}: "


class _Tags:
    """Reads tags, and the text before each of them."""

    def __init__(self, reading: Reading) -> None:
        self._source = reading.source
        self._again: str | None = None

    def next(self, sink: Sink | None = None) -> Reader[str | None]:
        """Returns what is in the next tag; None at the end of the output. A mark without a tag is text."""
        tag, self._again = self._again, None
        marker = (yield from self._source.until(_TAG, sink)) if tag is None else None
        while marker == _OPENS:
            tag, marker = yield from self._source.text_until(_TAG_ENDS)
            if marker == _OPENS and sink is not None:
                sink(f"{_OPENS}{tag}")
            elif marker is None:
                tag = None
        return tag

    def give_back(self, tag: str) -> None:
        """Has a tag come again."""
        self._again = tag


def nested_calls(reading: Reading, _: str) -> Reader[None]:
    """Reads calls up to the end of their section. What else is between them is left out."""
    tags, output = _Tags(reading), reading.output
    while (tag := (yield from tags.next())) not in (None, _SECTION_ENDS):
        found = _INVOKE.fullmatch(tag or "")
        if found is not None:
            output.begin_call(found["name"])
            output.arguments("{")
            if (yield from _elements(reading, tags, _Container(reading.tools.get(found["name"]), "}"))):
                output.arguments("}")
            output.end_call()
    output.content.mark()


def _elements(reading: Reading, tags: _Tags, arguments: _Container) -> Reader[bool]:
    """Reads elements up to the end of the call. Returns False where it came within one of them, or not at all."""
    output = reading.output
    containers = [arguments]
    while (tag := (yield from tags.next())) is not None:
        if _ends_call(tag):
            if tag != _CALL_ENDS:
                tags.give_back(tag)
            return len(containers) == 1
        container = containers[-1]
        if tag.startswith("/"):
            if len(containers) > 1:
                containers.pop()
                _write(output, container, container.closing)
            continue
        before, schema = container.begin(tag), container.schema_of(tag)
        element = _Container(resolved(schema), "", is_written=before is not None)
        _write(output, element, before or "")
        if is_text(schema):
            yield from _text(reading, tags, element, f"/{tag}")
            continue
        parts: list[str] = []
        inner = yield from tags.next(parts.append)
        if inner is None or inner.startswith("/") or _ends_call(inner):
            if not (inner is None and output.is_cut):
                _write(output, element, _value("".join(parts), schema))
        else:
            element.closing = "]" if _is_list(schema, inner) else "}"
            _write(output, element, "[" if element.closing == "]" else "{")
            containers.append(element)
        if inner is not None and inner != f"/{tag}":
            tags.give_back(inner)
    return False


def _text(reading: Reading, tags: _Tags, element: _Container, closing: str) -> Reader[None]:
    """Reads a text up to its own closing tag, or one that ends the call: others are text."""
    source, output = reading.source, reading.output
    ends = Markers(f"{_OPENS}{closing}>", *(f"{_OPENS}{tag}>" for tag in (_CALL_ENDS, _SECTION_ENDS)), f"{_OPENS}{_INVOKES}")
    _write(output, element, '"')
    marker = yield from source.until(ends, output.text_argument if element.is_written else None)
    if marker == f"{_OPENS}{_INVOKES}":
        rest, _ = yield from source.text_until(Markers(">"))
        tags.give_back(f"{_INVOKES}{rest}")
    elif marker is not None and marker != f"{_OPENS}{closing}>":
        tags.give_back(marker.removeprefix(_OPENS).removesuffix(">"))
    if not (marker is None and output.is_cut):
        _write(output, element, '"')


def _ends_call(tag: str) -> bool:
    return tag in (_CALL_ENDS, _SECTION_ENDS) or _INVOKE.fullmatch(tag) is not None


def _is_list(schema: Any, first: str) -> bool:
    """Says if an element is a list. Where its schema leaves that open, the tag of what is first in it says it."""
    types = types_of(schema)
    return "array" in types if ("array" in types) != ("object" in types) else first == _ITEM


def _value(text: str, schema: Any) -> str:
    """Returns the JSON of what has no elements: of an empty object or list there is no text."""
    types = types_of(schema)
    if not text.strip() and types and "string" not in types:
        return "[]" if "array" in types else "{}" if "object" in types else "null"
    return json_value(text, schema)


def _write(output: Output, element: _Container, text: str) -> None:
    if element.is_written:
        output.arguments(text)
