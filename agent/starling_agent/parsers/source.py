"""The text of an output as it comes, and what readers wait for in it.

Readers are generators: they yield when they need more text. So a format is read as if all of its text were there.
"""

import re
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starling_engine.frontend.stop_strings import longest_beginning

from starling_agent.parsers.events import Steady
from starling_agent.parsers.output import TrimmedText

T = TypeVar("T")
Reader = Generator[None, None, T]
Sink = Callable[[str], None]


class Straight(Protocol):
    """Takes text without markers' tokens in place of a reader, which has read all before."""

    def take(self, text: str) -> tuple[int, bool]:
        """Returns how many characters it has read, and if it wants more; all are read as long as it does."""

    def steady(self) -> Steady | None:
        """Returns what becomes of text that need not even be taken; None: it has to be."""


LONGEST_WORD = 256
CHUNK = 4096
"""Characters that are looked at in one go, so that the rest of a long text is not copied for each of its values."""
_SPACE = re.compile(r"\s+")


class Markers:
    """Constant texts that end what is before them. Of two at one place the longer one counts."""

    def __init__(self, *markers: str) -> None:
        self.all = tuple(dict.fromkeys(markers))
        self.pattern = re.compile("|".join(re.escape(one) for one in sorted(self.all, key=len, reverse=True)))
        self.firsts = "".join(sorted({marker[:1] for marker in markers}))
        """The first characters of all."""


class Source:
    """Text that was not read yet. `is_ended` says that no more will come.

    A marker that the tokenizer has as a token of its own counts only where it was written as that token: a model that spells it
    means the text. A marker that is no token counts wherever its text is.
    """

    def __init__(self, token_texts: Collection[str]) -> None:
        self.is_ended = False
        self._token_texts = tuple(token_texts)
        self._by_token: dict[str, bool] = {}
        """True for markers that begin with a token."""
        self._text = ""
        self._at = 0
        self._begin = 0
        """Offset of `_text` in all that was added."""
        self._token_offsets: set[int] = set()
        self._last_token = -1
        self._kept: list[str] | None = None
        self._straight: Straight | None = None
        """Reads in place of the reader: nearly all text is such."""
        self._wants_more = True
        """The last answer of what takes text."""

    def add(self, text: str, token_offsets: Sequence[int]) -> bool:
        """Adds text. `token_offsets` are offsets in it, where tokens stand whose texts the tokenizer has as one token.

        Returns True if it is read already. Otherwise the reader has to go on.
        """
        if self._straight is not None and not token_offsets:
            taken, self._wants_more = self._straight.take(text)
            self._begin += taken
            if self._wants_more and taken == len(text):
                return True
            text = text[taken:]
        self._straight = None
        self._begin += self._at
        self._text = self._text[self._at :] + text
        self._at = 0
        if token_offsets:
            first = self._begin + len(self._text) - len(text)
            self._token_offsets.update(first + offset for offset in token_offsets)
            self._last_token = first + token_offsets[-1]
        return False

    def steady(self) -> Steady | None:
        """Returns what becomes of text that need not be added. Offsets of what is added go on as if it had not been there."""
        return None if self._straight is None else self._straight.steady()

    @property
    def is_at_end(self) -> bool:
        """True if all text was read, and no more will come."""
        return self.is_ended and self._at == len(self._text)

    # ---- what may be given back ----

    def keep(self) -> None:
        """Keeps what is read from now on, so that it can be given back as text."""
        self._kept = []

    def kept(self) -> str:
        """Returns what was read since `keep`, and keeps no more."""
        text, self._kept = "".join(self._kept or ()), None
        return text

    # ---- readers ----

    def until(self, markers: Markers, sink: Sink | None = None) -> Reader[str | None]:
        """Reads up to a marker and passes on what is before it, as soon as it cannot be the marker's beginning.

        Returns the marker, which is read too; None at the end of the output.
        """
        spelled = [marker for marker in markers.all if marker not in self._token_texts]
        straight = None if sink is None else _Passing(sink, markers.firsts if spelled else "")
        while True:
            held = 0
            if spelled or self._last_token >= self._begin + self._at:  # otherwise no marker can be here
                found = self._find(markers)
                if found is not None:
                    start, marker = found
                    self._pass(start, sink)
                    self._pass(start + len(marker), None)
                    return marker
                held = 0 if self.is_ended else self._beginning(markers, spelled)
            self._pass(len(self._text) - held, sink)
            if self.is_ended:
                return None
            self._straight = straight if self._kept is None and not held else None
            yield

    def text_until(self, markers: Markers) -> Reader[tuple[str, str | None]]:
        """Reads up to a marker. Returns what is before it, and the marker."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def through(self, straight: Straight) -> Reader[None]:
        """Passes on what comes as long as `straight` wants it."""
        self._wants_more = True
        while self._wants_more:
            if self._at < len(self._text):
                taken, self._wants_more = straight.take(self._text[self._at : self._at + CHUNK])
                self._pass(self._at + taken, None)
            elif self.is_ended:
                return
            else:
                self._straight = straight if self._kept is None else None
                yield

    def rest(self, sink: Sink) -> Reader[None]:
        """Passes on all that comes."""
        while chunk := (yield from self.chunk()):
            self.skip(len(chunk))
            sink(chunk)

    def next_character(self, *, skip_space: bool = True) -> Reader[str]:
        """Returns the next character without reading it; white space before it is read. Returns "" at the end."""
        while True:
            if skip_space:
                space = _SPACE.match(self._text, self._at)
                self._pass(space.end() if space else self._at, None)
            if self._at < len(self._text):
                return self._text[self._at]
            if self.is_ended:
                return ""
            yield

    def chunk(self) -> Reader[str]:
        """Returns what is there without reading it, at least a character; "" at the end."""
        while self._at == len(self._text):
            if self.is_ended:
                return ""
            yield
        return self._text[self._at : self._at + CHUNK]

    def skip(self, characters: int) -> None:
        """Reads characters of what `chunk` returned."""
        self._pass(self._at + characters, None)

    def word(self, pattern: re.Pattern[str]) -> Reader[str]:
        """Reads what the expression matches from here on; "" if nothing does. At most `LONGEST_WORD` characters count."""
        while True:
            match = pattern.match(self._text, self._at, self._at + LONGEST_WORD)
            end = match.end() if match else self._at
            if end < len(self._text) or self.is_ended or end - self._at == LONGEST_WORD:
                word = self._text[self._at : end]
                self._pass(end, None)
                return word
            yield

    def back(self, text: str) -> None:
        """Puts back what was read last."""
        self._at -= len(text)

    def try_read(self, marker: str) -> Reader[bool]:
        """Reads the marker if it comes next, and says if it did."""
        while True:
            rest = self._text[self._at : self._at + len(marker)]
            if rest == marker and self._is_marker(self._at, marker):
                self._pass(self._at + len(marker), None)
                return True
            if self.is_ended or not marker.startswith(rest) or (rest == marker):
                return False
            yield

    def try_close(self, marker: str) -> Reader[None]:
        """Reads white space, and the marker if it comes then."""
        yield from self.next_character()
        yield from self.try_read(marker)

    def counts(self, offset: int, marker: str) -> bool:
        """Says if a marker at an offset of the output is one: where it begins with a token, that has to be there."""
        return not self._begins_with_token(marker) or offset in self._token_offsets

    # ---- inside ----

    def _find(self, markers: Markers) -> tuple[int, str] | None:
        at = self._at
        while (match := markers.pattern.search(self._text, at)) is not None:
            if self._is_marker(match.start(), match.group()):
                return match.start(), match.group()
            at = match.start() + 1
        return None

    def _is_marker(self, start: int, marker: str) -> bool:
        return self.counts(self._begin + start, marker)

    def _begins_with_token(self, marker: str) -> bool:
        known = self._by_token.get(marker)
        if known is None:
            known = self._by_token[marker] = marker.startswith(self._token_texts)
        return known

    def _beginning(self, markers: Markers, spelled: Sequence[str]) -> int:
        held = longest_beginning(self._text[self._at :], spelled) if spelled else 0
        # A token comes whole, except where its end may begin a stop string.
        last = self._last_token - self._begin
        if self._at <= last and any(marker.startswith(self._text[last:]) for marker in markers.all):
            held = max(held, len(self._text) - last)
        return held

    def _pass(self, end: int, sink: Sink | None) -> None:
        if end <= self._at:
            return
        text = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(text)
        if sink is not None:
            sink(text)


@dataclass(slots=True)
class _Passing:
    """Passes on text in which no marker can begin; `firsts` are the characters with which one may."""

    sink: Sink
    firsts: str

    def take(self, text: str) -> tuple[int, bool]:
        if any(first in text for first in self.firsts):
            return 0, True
        self.sink(text)
        return len(text), True

    def steady(self) -> Steady | None:
        return self.sink.steady(self.firsts) if isinstance(self.sink, TrimmedText) else None
