"""The parts of one answer: content, reasoning, and calls of tools with their ids."""

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from starling_engine.outputs import FinishReason, OutputDelta

from starling_agent.openai.output_format import OutputReading
from starling_agent.parsers.events import Arguments, CallBegin, Content, Event, Reasoning


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
    """Reads one output piece by piece. Without a reading all of it is content."""

    def __init__(self, reading: OutputReading | None) -> None:
        self.calls = 0
        """Calls up to now."""
        self._reading = reading
        self._parser = None if reading is None else reading.parser()
        self._hides_calls = False
        self._ids: set[str] = set()

    def read(self, output: OutputDelta) -> list[Piece]:
        """Returns the pieces that the output's next text completes, those of one kind that follow each other joined."""
        if self._parser is None:
            return [Content(output.text)] if output.text else []
        events = self._parser.feed(output.text, output.shown_offsets)
        if output.finish_reason is not None:
            # A stop string may end an output anywhere.
            is_cut = output.finish_reason != "stop" or isinstance(output.stop_reason, str)
            events += self._parser.finish(is_cut)
        return _joined(self._pieces(events))

    def ended_by(self, reason: FinishReason) -> FinishReason | Literal["tool_calls"]:
        """Returns the reason for which the answer ended."""
        has_whole_calls = self.calls > 0 and self._parser is not None and not self._parser.has_open_call
        return "tool_calls" if has_whole_calls and reason == "stop" else reason

    def _id(self, given: str | None) -> str:
        """Returns the model's own id of a call if no other call has it, or a new one."""
        found = given if given and given not in self._ids else None
        if found is None:
            short = self._reading is not None and self._reading.family.short_ids
            found = secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"
        self._ids.add(found)
        return found

    def _pieces(self, events: Iterable[Event]) -> Iterator[Piece]:
        assert self._reading is not None
        for event in events:
            match event:
                case Content():
                    yield event
                case Reasoning() if self._reading.shows_reasoning:
                    yield event
                case CallBegin(name, call_id):
                    self._hides_calls = not self._reading.parallel and self.calls > 0
                    if not self._hides_calls:
                        self.calls += 1
                        yield CallPiece(self.calls - 1, id=self._id(call_id), name=name)
                case Arguments(text) if not self._hides_calls:
                    yield CallPiece(self.calls - 1, text)


@dataclass(slots=True)
class AnswerParts:
    """A whole answer: texts and calls in the order in which they were written."""

    _pieces: list[Piece] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        self._pieces += pieces

    @property
    def blocks(self) -> list[Content | Reasoning | ToolCall]:
        """The parts, those of one kind that follow each other joined."""
        return [
            ToolCall(piece.id or "", piece.name or "", piece.arguments) if isinstance(piece, CallPiece) else piece
            for piece in _joined(self._pieces)
        ]

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self._pieces if isinstance(piece, Content))

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self._pieces if isinstance(piece, Reasoning))

    @property
    def calls(self) -> list[ToolCall]:
        return [block for block in self.blocks if isinstance(block, ToolCall)]


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    return [_one([*group]) for _, group in itertools.groupby(pieces, _part_of)]


def _part_of(piece: Piece) -> tuple[type[Piece], int | None]:
    return type(piece), piece.index if isinstance(piece, CallPiece) else None


def _one(pieces: Sequence[Piece]) -> Piece:
    """Joins pieces of one kind, or of one call."""
    match pieces[0]:
        case CallPiece(index, _, call_id, name):
            return CallPiece(index, "".join(piece.arguments for piece in pieces if isinstance(piece, CallPiece)), call_id, name)
        case Content():
            return Content("".join(piece.text for piece in pieces if isinstance(piece, Content)))
        case Reasoning():
            return Reasoning("".join(piece.text for piece in pieces if isinstance(piece, Reasoning)))
