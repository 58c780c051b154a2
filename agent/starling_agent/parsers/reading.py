"""Reads what all formats share: text outside of calls, and reasoning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import regex

from starling_agent.parsers.output import Output
from starling_agent.parsers.source import Markers, Reader, Sink, Source
from starling_agent.parsers.written_calls import WrittenCalls


@dataclass
class Reading:
    """An output that is being read.

    tools      the schema of each offered tool's arguments, by the tool's name
    has_calls  calls are possible; otherwise they are content
    text       where text goes that is no call: to the content, or to the reasoning
    """

    source: Source
    output: Output
    tools: Mapping[str, Any]
    has_calls: bool
    text: Sink

    def give_back(self, opening: str) -> None:
        """Passes on as text what was read as a call and is none. What a marker opened and the end cut is left out."""
        kept = self.source.kept()
        if not (opening and self.source.is_at_end and (self.output.is_cut or not kept.strip())):
            self.text(opening + kept)


ReadCalls = Callable[[Reading, str], Reader[None]]
"""Reads what follows a marker that opens calls. It gives back what is no call."""


@dataclass(frozen=True)
class Family:
    """Describes how models of a family write reasoning and calls.

    reasoning  pairs of markers that open and close it
    calls      readers of calls, by the marker that opens them
    at_start   reads calls that no marker opens, at the beginning of the content
    hidden     markers around the content
    whole      reads outputs whose every part has a header, in place of all the above
    tokens     markers besides those above that tokenizers may have as tokens
    trims      white space around calls is no content
    answer_role  the role of answers to calls, for chat templates that show no calls and write any role
    short_ids  chat templates take ids of calls that are nine letters and digits
    written    the form of calls for a grammar; None where it is not known
    begins     ends what is before the model's message in a prompt; what is behind it was written of the output already
    template   texts that chat templates of this format have, all of them, and those of none above it in the table
    other_templates  likewise, of other templates of the same format
    spells_marks  chat templates of models that reason have its marks; others put them together from parts
    """

    name: str
    reasoning: tuple[tuple[str, str], ...] = ()
    calls: Mapping[str, ReadCalls] = field(default_factory=dict)
    at_start: Callable[[Reading], Reader[None]] | None = None
    hidden: tuple[str, ...] = ()
    whole: Callable[[Reading], Reader[None]] | None = None
    tokens: tuple[str, ...] = ()
    trims: bool = True
    answer_role: str = "tool"
    short_ids: bool = False
    template: tuple[str, ...] = ()
    other_templates: tuple[tuple[str, ...], ...] = ()
    spells_marks: bool = True
    written: WrittenCalls | None = field(kw_only=True)
    begins: "regex.Pattern[str] | None" = None

    @cached_property
    def closings(self) -> Mapping[str, str]:
        """The markers that close reasoning, by those that open it."""
        return dict(self.reasoning)

    @cached_property
    def content_ends(self) -> Markers:
        """Markers that are no content. One that closes reasoning which nothing has opened is none either."""
        return Markers(*self.calls, *self.closings, *self.closings.values(), *self.hidden)

    @cached_property
    def reasoning_ends(self) -> Markers:
        return Markers(*self.closings.values(), *self.calls, *self.hidden)

    @cached_property
    def markers(self) -> frozenset[str]:
        """All markers that a tokenizer may have as tokens."""
        return frozenset((*self.content_ends.all, *self.tokens))


def read(reading: Reading, family: Family, reasons: bool) -> Reader[None]:
    """Reads an output to its end. With `reasons` it begins within reasoning that the prompt has opened."""
    if family.whole is not None:
        yield from family.whole(reading)
        return
    source, output = reading.source, reading.output
    marker: str | None = ""
    if reasons:
        marker = next(iter(family.closings))
        yield from source.next_character()
        yield from source.try_read(marker)  # models may open what the prompt has opened
    while marker is not None:
        if marker in family.closings:
            output.content.mark()
            output.reasoning.mark()
            yield from _reasoning(reading, family)
        elif marker in family.calls:
            reading.text = output.content
            yield from family.calls[marker](reading, marker)
        elif marker in family.hidden:
            output.content.mark()
        if family.at_start is not None and not output.content.has_begun:
            reading.text = output.content
            yield from family.at_start(reading)
        marker = yield from source.until(family.content_ends, output.content)


def _reasoning(reading: Reading, family: Family) -> Reader[None]:
    """Reads up to the end of reasoning: its marker, one of the content, or a call."""
    output = reading.output
    reading.text = output.reasoning
    while (marker := (yield from reading.source.until(family.reasoning_ends, output.reasoning))) is not None:
        calls = output.calls
        if marker in family.calls:
            yield from family.calls[marker](reading, marker)
        if marker not in family.calls or output.calls > calls:
            output.reasoning.mark()
            return
