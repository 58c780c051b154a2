"""The parts of one answer: content, reasoning, and calls of tools with their ids."""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from starling_agent.openai.output_format import OutputReading
from starling_agent.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; its arguments are the text of a JSON object, unless the output was cut in it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of an answer's call number `index`. The first piece has the call's id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Piece = Content | Reasoning | CallPiece


class AnswerReader:
    """Reads one output piece by piece."""

    def __init__(self, reading: OutputReading) -> None:
        self.calls = 0
        """Calls up to now."""
        self._parser = reading.parser()
        self._is_serial = not reading.parallel
        self._shows_reasoning = reading.shows_reasoning
        self._hides_calls = False

    def read(self, text: str, shown_offsets: list[int], finish_reason: str | None) -> list[Piece]:
        """Returns the pieces that the output's next text completes, those of one kind that follow each other joined."""
        events = self._parser.feed(text, shown_offsets)
        if finish_reason is not None:
            events += self._parser.finish(is_cut=finish_reason != "stop")
        return _joined(self._pieces(events))

    def _pieces(self, events: Iterable[Event]) -> Iterator[Piece]:
        for event in events:
            match event:
                case Content():
                    yield event
                case Reasoning() if self._shows_reasoning:
                    yield event
                case CallBegin(name, call_id):
                    self._hides_calls = self._is_serial and self.calls > 0
                    if not self._hides_calls:
                        self.calls += 1
                        yield CallPiece(self.calls - 1, id=call_id or f"call_{secrets.token_hex(12)}", name=name)
                case Arguments(text) if not self._hides_calls:
                    yield CallPiece(self.calls - 1, text)
                case CallEnd() | _:
                    pass


@dataclass(slots=True)
class AnswerParts:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallPiece():
                    if piece.id is not None:
                        self.calls.append(ToolCall(piece.id, piece.name or ""))
                    self.calls[-1].arguments += piece.arguments


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallPiece) and isinstance(last, CallPiece) and piece.index == last.index:
            joined[-1] = CallPiece(last.index, last.arguments + piece.arguments, last.id, last.name)
        else:
            joined.append(piece)
    return joined
