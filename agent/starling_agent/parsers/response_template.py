"""Formats that checkpoints describe themselves: the `response_template` of tokenizer_config.json.

https://huggingface.co/docs/transformers/main/chat_response_parsing
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import regex

from starling_agent.parsers.output import Output
from starling_agent.parsers.reading import Family, Reading
from starling_agent.parsers.region_values import CONTENTS, TAGS, RegionReader, transformed
from starling_agent.parsers.schemas import json_value, schema_of, types_of
from starling_agent.parsers.source import Reader, Sink

DESCRIBED = "response_template"
LONGEST_MARK = 1024
"""Characters that are held back as the beginning of a mark; what is longer is text."""
_TEXTS = {"content": "content", "thinking": "reasoning", "reasoning": "reasoning", "reasoning_content": "reasoning"}
"""The parts of an answer by the names that fields have; those of other names are left out."""
_CALLS = "tool_calls"


@dataclass(frozen=True)
class Mark:
    """Opens or closes a region: one of the texts, or what the expression matches.

    `is_final`: nothing that comes later makes a match longer.
    """

    pattern: "regex.Pattern[str]"
    is_final: bool
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Region:
    """A field of a template. One without `opens` has all that no other one has."""

    field: str
    opens: Mark | None
    closes: Mark | None
    content: str
    arguments: Mapping[str, Any]
    transform: Any
    is_list: bool
    join: str
    """Stands between the texts of several regions of the field."""


def described_family(template: Any, special: Sequence[str]) -> Family:
    """Returns the format that a checkpoint's template describes; `special` are the texts of its tokenizer's tokens.

    Raises ValueError that says what is wrong with the template.
    """
    if template is None:
        raise ValueError("there is none")
    try:
        return _family(template, special)
    except (TypeError, AttributeError, KeyError, regex.error) as error:
        raise ValueError(f"it is malformed: {error}") from None


def _family(template: Any, special: Sequence[str]) -> Family:
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict) or template.get("version", 1) != 1:
        raise ValueError("it must be an object of version 1 with fields")
    regions = tuple(_region(name, spec) for name, spec in template["fields"].items())
    if sum(region.opens is None for region in regions) > 1:
        raise ValueError("only one field may have neither open nor open_pattern")
    starts = _mark(template, "start_anchor")
    if starts is None:
        raise ValueError("it must have start_anchor or start_anchor_pattern")
    written = json.dumps(template, ensure_ascii=False).replace("\\", "")
    return Family(
        DESCRIBED,
        tuple(pair for region in regions for pair in _pairs(region)),
        whole=partial(_read, regions),
        begins=starts.pattern,
        tokens=tuple(text for text in special if text in written),
        trims=all(region.arguments.get("strip", True) for region in regions if region.field == "content"),
        written=None,
    )


def _region(name: str, spec: Any) -> Region:
    if not isinstance(spec, dict):
        raise ValueError(f"the field {name} must be an object")
    content, arguments = spec.get("content", "text"), spec.get("content_args", {})
    if content not in CONTENTS:
        raise ValueError(f"the field {name} has the content {content!r}; possible: {', '.join(CONTENTS)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the content_args of the field {name} must be an object")
    if content == TAGS and "key" not in _compiled(arguments["tag_pattern"]).groupindex:
        raise ValueError(f"the tag_pattern of the field {name} must have a group key")
    return Region(
        name,
        _mark(spec, "open"),
        _mark(spec, "close"),
        content,
        arguments,
        spec.get("transform"),
        bool(spec.get("transform_each", False)),
        str(spec.get("join") or ""),
    )


def _pairs(region: Region) -> Iterator[tuple[str, str]]:
    """Yields the markers of a region of reasoning, as other formats have them."""
    if _TEXTS.get(region.field) == "reasoning" and region.opens is not None and region.closes is not None:
        yield from itertools.product(region.opens.texts, region.closes.texts)


def _mark(spec: Mapping[str, Any], name: str) -> Mark | None:
    """Returns what a template has as a text, several texts, or an expression."""
    given = spec.get(name)
    if given is None:
        pattern = spec.get(f"{name}_pattern")
        return None if pattern is None else Mark(_compiled(pattern), is_final=False)
    texts = sorted({given} if isinstance(given, str) else set(given), key=len, reverse=True)
    if not texts or not all(texts):
        raise ValueError(f"{name} must be a text, or several, and none of them empty")
    extends = any(one != other and one.startswith(other) for one in texts for other in texts)
    return Mark(_compiled("|".join(map(regex.escape, texts))), not extends, tuple(texts))


def _compiled(pattern: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(pattern, regex.DOTALL)
    except (regex.error, TypeError) as error:
        raise ValueError(f"{pattern!r} is no expression: {error}") from None


class _Text:
    """The text of an output that is looked through for marks, and LONGEST_MARK characters before it, which a mark may look at."""

    def __init__(self, reading: Reading) -> None:
        self._source = reading.source
        self._text = ""
        self._begin = 0
        """Offset of `_text` in the output."""
        self._at = 0
        self._empty_at = -1
        """Place of the last mark that has no text: another one there would be found for ever."""

    def next_mark(self, marks: "Marks", sink: Sink | None) -> Reader["Found | None"]:
        """Reads up to a mark, and passes on the text before it as it comes. Returns None at the end."""
        while True:
            found, held = self._search(marks)
            if found is not None:
                self._pass(found[1].start(), sink)
                self._at = found[1].end()
                self._empty_at = self._at if not found[1].group() else -1
                return found
            self._pass(max(held, len(self._text) - LONGEST_MARK), sink)
            if self._source.is_at_end:
                return None
            chunk = yield from self._source.chunk()
            self._source.skip(len(chunk))
            self._add(chunk)

    def _add(self, chunk: str) -> None:
        past = max(0, self._at - LONGEST_MARK)
        self._text = self._text[past:] + chunk
        self._begin, self._at, self._empty_at = self._begin + past, self._at - past, self._empty_at - past

    def _pass(self, end: int, sink: Sink | None) -> None:
        begin, self._at = self._at, end
        if sink is not None and end > begin:
            sink(self._text[begin:end])

    def _search(self, marks: "Marks") -> "tuple[Found | None, int]":
        """Returns the first mark that is certain, and where the first one begins that may yet become one."""
        best: Found | None = None
        held = len(self._text)
        for region, mark in marks:
            match = self._first(mark)
            if match is None:
                continue
            grows = match.end() == len(self._text) and not (mark.is_final and match.group())
            if not self._source.is_at_end and (match.partial or grows):
                held = min(held, match.start())
            elif best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end()):
                best = region, match
        is_certain = best is not None and (best[1].start() < held or self._source.is_at_end)
        return (best if is_certain else None), held

    def _first(self, mark: Mark) -> "regex.Match[str] | None":
        at = self._at
        while (match := mark.pattern.search(self._text, at, partial=not self._source.is_at_end)) is not None:
            is_empty_again = not match.group() and match.start() == self._empty_at
            if match.partial or (self._source.counts(self._begin + match.start(), match.group()) and not is_empty_again):
                return match
            at = match.start() + 1
        return None


Found = tuple[Region, "regex.Match[str]"]
Marks = Sequence[tuple[Region, Mark]]


def _read(regions: Sequence[Region], reading: Reading) -> Reader[None]:
    """Reads an output, behind what the prompt has written of it, to its end."""
    text, values, output = _Text(reading), RegionReader(), reading.output
    rest = next((region for region in regions if region.opens is None), None)
    marks = [(one, one.opens) for one in regions if one.opens is not None and (reading.has_calls or one.field != _CALLS)]
    if rest is not None and rest.closes is not None:
        marks.append((rest, rest.closes))
    seen = set[str]()
    while (found := (yield from text.next_mark(marks, _sink(output, rest)))) is not None:
        region, _ = found
        output.content.mark()
        output.reasoning.mark()
        closing = [] if region.closes is None else [(region, region.closes)]
        if region.field == _CALLS:
            body: list[str] = []
            closed = yield from text.next_mark(closing, body.append)
            if closed is not None or not output.is_cut:
                _write_calls(reading, values, found, "".join(body), "" if closed is None else closed[1].group())
        elif region is not rest:
            sink = _sink(output, region)
            if sink is not None and region.join and region.field in seen:
                sink(region.join)
            seen.add(region.field)
            yield from text.next_mark(closing, sink)
        output.content.mark()
        output.reasoning.mark()


def _sink(output: Output, region: Region | None) -> Sink | None:
    part = None if region is None else _TEXTS.get(region.field)
    return None if part is None else getattr(output, part)


def _write_calls(reading: Reading, values: RegionReader, found: Found, body: str, closing: str) -> None:
    """Writes the calls of a region that was found; what is none is content."""
    try:
        calls = [_call(one, reading.tools) for one in _values(values, *found, body)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TimeoutError, regex.error):
        reading.output.content(found[1].group() + body + closing)
        return
    for name, call_id, arguments in calls:
        reading.output.begin_call(name, call_id)
        reading.output.arguments(arguments)
        reading.output.end_call()


def _values(values: RegionReader, region: Region, opening: "regex.Match[str]", body: str) -> list[Any]:
    value = values.read(region.content, body, region.arguments)
    names = {name: text for name, text in opening.groupdict().items() if text is not None}
    if region.transform is None:
        return value if isinstance(value, list) else [value]
    if region.is_list:
        return [transformed(region.transform, {**names, **one}) for one in value]
    return [transformed(region.transform, {**names, "content": value})]


def _call(value: Any, tools: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Returns the name, the id and the arguments' JSON of a call. Raises TypeError for what is none."""
    function = value.get("function", value)
    name, arguments, call_id = function["name"], function.get("arguments", {}), value.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str | None) or not isinstance(arguments, dict | str):
        raise TypeError(name)
    if isinstance(arguments, dict):
        typed = {key: _typed(one, schema_of(tools.get(name), key)) for key, one in arguments.items()}
        return name, call_id, json.dumps(typed, ensure_ascii=False)
    return name, call_id, arguments


def _typed(value: Any, schema: Any) -> Any:
    """Returns a value of a type that the schema has, where it was written as text and the schema has no text."""
    types = types_of(schema)
    return json.loads(json_value(value, schema)) if isinstance(value, str) and types and "string" not in types else value
