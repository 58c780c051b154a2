"""The parts of one answer: content, reasoning, and calls of tools with their ids."""

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from starling_engine.outputs import FinishReason, OutputDelta

from starling_agent.openai.custom_tools import InputReader
from starling_agent.openai.output_format import OutputReading
from starling_agent.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning, Steady, SteadyKind


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; its arguments are the text of a JSON object, unless the output was cut in it.

    Those of a tool that `is_custom` are any text.
    """

    id: str
    name: str
    arguments: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class CallPiece:
    """A piece of an answer's call number `index`. The first piece has the call's id and name.

    arguments  a piece of their JSON; of the text, if the tool `is_custom`
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    is_custom: bool = False


Piece = Content | Reasoning | CallPiece


class AnswerReader:
    """Reads one output piece by piece. Without a reading all of it is content."""

    __slots__ = (
        "_hides_calls",
        "_ids",
        "_input",
        "_parser",
        "_reading",
        "_shows_reasoning",
        "_steady",
        "_undecided",
        "calls",
        "reasoning_tokens",
    )

    def __init__(self, reading: OutputReading | None) -> None:
        self.calls = 0
        """Calls up to now."""
        self.reasoning_tokens = 0
        """Tokens of reasoning up to now, also of such as is not shown."""
        self._undecided = 0
        """Tokens behind which no text has come yet."""
        self._reading = reading
        self._parser = None if reading is None else reading.parser()
        self._shows_reasoning = reading is None or reading.shows_reasoning
        self._hides_calls = False
        self._ids: set[str] = set()
        self._input: InputReader | None = None
        """Reads the text of the last call; None where it is that of a function."""
        self._steady: Steady | None = None
        """The parser's, where the text is a piece of the answer as it is."""

    def steady_kind(self, output: OutputDelta) -> SteadyKind | None:
        """Returns what the output's text is a piece of, if it is nothing else, as nearly all are; None: it has to be read."""
        steady, text = self._steady, output.text
        if steady is None or not text or output.shown_offsets or output.finish_reason is not None:
            return None
        if steady.pattern.fullmatch(text) is None:
            return None
        if steady.event is Reasoning:
            self.reasoning_tokens += self._undecided + len(output.token_ids)
        self._undecided = 0
        return steady.event

    def read(self, output: OutputDelta) -> list[Piece]:
        """Returns the pieces that the output's next text completes, those of one kind that follow each other joined."""
        if self._parser is None:
            return [Content(output.text)] if output.text else []
        if (kind := self.steady_kind(output)) is not None:
            if kind is Arguments:
                return [CallPiece(self.calls - 1, output.text)]
            return [Content(output.text) if kind is Content else Reasoning(output.text)]
        events = self._parser.feed(output.text, output.shown_offsets)
        self._undecided += len(output.token_ids)
        if output.finish_reason is None:
            pieces = self._pieces(events) if events else []
            self._steady = self._steady_pieces(self._parser.steady)
            return pieces
        # A stop string may end an output anywhere.
        is_cut = output.finish_reason != "stop" or isinstance(output.stop_reason, str)
        pieces = self._pieces([*events, *self._parser.finish(is_cut)])
        if (piece := self._end_input()) is not None:
            pieces.append(piece)  # the output was cut in it
        return _joined(pieces)

    def _steady_pieces(self, steady: Steady | None) -> Steady | None:
        """Returns what the parser says of the text that comes, if all of it is shown."""
        if steady is None:
            return None
        if steady.event is Arguments:
            return None if self._hides_calls or self._input is not None else steady
        return steady if self._shows_reasoning or steady.event is not Reasoning else None

    def _pieces(self, events: Sequence[Event]) -> list[Piece]:
        """Returns what the events add to the answer, and counts the tokens of reasoning among them."""
        if len(events) == 1:  # nearly always
            event = events[0]
            if type(event) is Reasoning:
                self.reasoning_tokens += self._undecided
            self._undecided = 0
            piece = self._piece(event)
            return [] if piece is None else [piece]
        if events:
            self.reasoning_tokens += self._count_reasoning(events)
        return _joined([piece for event in events if (piece := self._piece(event)) is not None])

    def ended_by(self, reason: FinishReason) -> FinishReason | Literal["tool_calls"]:
        """Returns the reason for which the answer ended."""
        has_whole_calls = self.calls > 0 and self._parser is not None and not self._parser.has_open_call
        return "tool_calls" if has_whole_calls and reason == "stop" else reason

    def _count_reasoning(self, events: Sequence[Event]) -> int:
        """Returns how many more tokens are reasoning: all up to a text that is nothing else, or those that its text has."""
        assert self._reading is not None
        tokens, self._undecided = self._undecided, 0
        thoughts = [event.text for event in events if isinstance(event, Reasoning)]
        if len(thoughts) == len(events):
            return tokens
        return sum(map(self._reading.count_tokens, thoughts))

    def _id(self, given: str | None) -> str:
        """Returns the model's own id of a call if no other call has it, or a new one."""
        found = given if given and given not in self._ids else None
        if found is None:
            short = self._reading is not None and self._reading.family.short_ids
            found = secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"
        self._ids.add(found)
        return found

    def _piece(self, event: Event) -> Piece | None:
        """Returns what an event adds to the answer, if anything."""
        assert self._reading is not None
        match event:
            case Arguments():
                if self._hides_calls:
                    return None
                return CallPiece(self.calls - 1, event.text) if self._input is None else self._input_piece(event.text)
            case Content():
                return event
            case Reasoning():
                return event if self._shows_reasoning else None
            case CallBegin():
                self._hides_calls = not self._reading.parallel and self.calls > 0
                if self._hides_calls:
                    return None
                self.calls += 1
                is_custom = event.name in self._reading.custom
                self._input = InputReader() if is_custom else None
                return CallPiece(self.calls - 1, id=self._id(event.id), name=event.name, is_custom=is_custom)
            case CallEnd():
                return self._end_input()

    def _input_piece(self, arguments: str) -> Piece | None:
        """Returns what arguments add to the text of a custom tool's call."""
        assert self._input is not None
        text = self._input.feed(arguments)
        return CallPiece(self.calls - 1, text, is_custom=True) if text else None

    def _end_input(self) -> Piece | None:
        """Returns what is left of the open call's text."""
        reader, self._input = self._input, None
        text = "" if reader is None else reader.rest()
        return CallPiece(self.calls - 1, text, is_custom=True) if text else None


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
            ToolCall(piece.id or "", piece.name or "", piece.arguments, piece.is_custom) if isinstance(piece, CallPiece) else piece
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


def _joined(pieces: list[Piece]) -> list[Piece]:
    if len(pieces) < 2:  # nearly always
        return pieces
    return [_one([*group]) for _, group in itertools.groupby(pieces, _part_of)]


def _part_of(piece: Piece) -> tuple[type[Piece], int | None]:
    return type(piece), piece.index if isinstance(piece, CallPiece) else None


def _one(pieces: Sequence[Piece]) -> Piece:
    """Joins pieces of one kind, or of one call."""
    match pieces[0]:
        case CallPiece() as first:
            return replace(first, arguments="".join(piece.arguments for piece in pieces if isinstance(piece, CallPiece)))
        case Content():
            return Content("".join(piece.text for piece in pieces if isinstance(piece, Content)))
        case Reasoning():
            return Reasoning("".join(piece.text for piece in pieces if isinstance(piece, Reasoning)))
