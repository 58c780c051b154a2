"""A parser for one output."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starling_agent.parsers.events import Arguments, CallBegin, CallEnd, Event, Steady
from starling_agent.parsers.output import Output
from starling_agent.parsers.reading import Family, Reading, read
from starling_agent.parsers.source import Source


class OutputParser:
    """Splits one output into events. The events are the same for any grouping of its text into pieces, but for where texts are cut.

    Args:
        family: the format.
        tools: the schema of each offered tool's arguments, by the tool's name; None where calls are content.
        token_texts: the texts that the tokenizer has as tokens of their own; the format's markers among them count only as such.
        reasons: the prompt has opened reasoning.
        prefix: what the prompt has written of the output, which makes no events.
        whole_calls: a call leaves when it is complete; one that was cut, or whose arguments are no JSON, does not.
    """

    # With 1,000 streams a token finds nothing of its stream in the processor's caches: slots are fewer lines of memory.
    __slots__ = ("_output", "_reader", "_source", "_unfinished", "_whole_calls", "steady")

    def __init__(
        self,
        family: Family,
        tools: Mapping[str, Any] | None,
        token_texts: Collection[str],
        *,
        reasons: bool = False,
        prefix: str = "",
        whole_calls: bool = False,
    ) -> None:
        self._source = Source([text for text in family.markers if text in token_texts])
        self._output = Output(family.trims)
        reading = Reading(self._source, self._output, tools or {}, tools is not None, self._output.content)
        self._reader = read(reading, family, reasons)
        self._whole_calls = whole_calls
        self._unfinished: list[Event] = []
        self.steady: Steady | None = None
        """Says what becomes of text that need not be fed, which is nearly all: the way through here costs more than its JSON."""
        next(self._reader, None)
        if prefix:
            self.feed(prefix, sorted(found.start() for text in token_texts for found in re.finditer(re.escape(text), prefix)))
            self._output.content.forget_space()
            self._output.reasoning.forget_space()

    @property
    def has_open_call(self) -> bool:
        """True if the output ended within a call."""
        return self._output.open_call is not None

    def feed(self, text: str, token_offsets: Sequence[int] = ()) -> list[Event]:
        """Takes more text. `token_offsets` are offsets in it where the markers' tokens begin."""
        if not text:
            return []
        if not self._source.add(text, token_offsets):
            next(self._reader, None)
        self.steady = None if self._whole_calls else self._source.steady()
        return self._events()

    def finish(self, is_cut: bool) -> list[Event]:
        """Takes the end of the output. `is_cut` says that the model had not ended it."""
        self._source.is_ended = True
        self._output.is_cut = is_cut
        next(self._reader, None)
        self._output.end_call()
        self._output.content.end()
        self._output.reasoning.end()
        return self._events()

    def _events(self) -> list[Event]:
        events = self._output.take()
        return self._only_whole(events) if self._whole_calls else events

    def _only_whole(self, events: list[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if isinstance(event, CallBegin):
                self._unfinished = [event]
            elif isinstance(event, Arguments):
                self._unfinished.append(event)
            elif isinstance(event, CallEnd):
                passed += [] if event.is_repaired else [*self._unfinished, event]
            else:
                passed.append(event)
        return passed
