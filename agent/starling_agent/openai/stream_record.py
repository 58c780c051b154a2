"""Notes that a server writes into a stream for its router, and the record of them with which another server goes on.

The notes are comments between the events: `: note JSON`. All notes up to one say what the events before it have brought each choice
up to. So a router forwards events when their note is there, and keeps the notes unread. Another server gets them as a body of
RESUME_TYPE: a line with the list of notes, and behind it the request's own body.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starling_engine.errors import InvalidRequest
from starling_engine.outputs import DraftCount, EarlierOutput, EarlierRun, FinishReason

RESUME_TYPE = "application/vnd.starling.resume"
RESUMABLE = "x-starling-resumable"
"""Asks for notes in a stream, and says of an answer that it has them: YES, or COUNTED where it cannot be resumed."""
YES, COUNTED = "yes", "counted"
NOTE_BEGIN, NOTE_END = b": note ", b"\n\n"
LAST_NOTE = b": note end\n\n"
"""Ends a stream that nobody is to go on with. One without it was cut."""


class StreamNote(msgspec.Struct, omit_defaults=True):
    """The answer's id and time, and a seed for each prompt; only the first note has it."""

    id: str
    created: int
    seeds: list[int]


class PromptNote(msgspec.Struct, array_like=True):
    """Counts of a prompt's deltas, when they change."""

    prompt: int
    cached: int
    drafts: int = 0
    accepted: int = 0


class GainNote(msgspec.Struct, array_like=True):
    """Tokens that a choice gained since the last note."""

    choice: int
    tokens: list[int]


class EndNote(msgspec.Struct, array_like=True):
    """The end of a choice. The reasons are those of its OutputDelta."""

    choice: int
    finish_reason: FinishReason
    stop_reason: int | str | None


class Note(msgspec.Struct, omit_defaults=True):
    """A stream's gains since the note before."""

    gains: list[GainNote]
    ends: list[EndNote] = []
    prompts: list[PromptNote] = []
    stream: StreamNote | None = None


class CountNote(msgspec.Struct):
    """Tokens that a stream has gained in all, where nobody can go on with it: a router's quotas count them."""

    tokens: int


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream that can be resumed: its `seeds` by prompt, and what it had elsewhere, of prompts that have begun to answer."""

    seeds: Sequence[int]
    earlier: dict[int, EarlierRun]

    @classmethod
    def of(cls, notes: Sequence[Note], seeds: Sequence[int], n: int, vocab_size: int) -> "StreamRecord":
        """Reads the notes of a request with `n` choices for each of its prompts. Raises InvalidRequest for notes of another one."""
        runs = {prompt: EarlierRun([EarlierOutput() for _ in range(n)]) for prompt in range(len(seeds))}
        begun: set[int] = set()
        try:
            for note in notes:
                begun.update(gain.choice // n for gain in note.gains)
                _read_note(note, runs, n, vocab_size)
        except KeyError:
            raise InvalidRequest("these notes are not of this request", "notes") from None
        return cls(seeds, {prompt: runs[prompt] for prompt in begun})


def _read_note(note: Note, runs: Mapping[int, EarlierRun], n: int, vocab_size: int) -> None:
    """Adds a note to the runs of its prompts. Raises KeyError for a prompt or a token that is not there."""
    for gain in note.gains:
        if unknown := [token for token in gain.tokens if not 0 <= token < vocab_size]:
            raise KeyError(unknown[0])
        runs[gain.choice // n].outputs[gain.choice % n].token_ids += gain.tokens
    for end in note.ends:
        output = runs[end.choice // n].outputs[end.choice % n]
        output.finish_reason, output.stop_reason = end.finish_reason, end.stop_reason
    for counts in note.prompts:
        run = runs[counts.prompt]
        run.num_cached_tokens, run.drafts = counts.cached, DraftCount(counts.drafts, counts.accepted)


_read_notes = msgspec.json.Decoder(list[Note]).decode


def split_record(body: bytes) -> tuple[list[Note], bytes]:
    """Returns the notes and the request of a body of RESUME_TYPE. Raises InvalidRequest."""
    notes, _, request = body.partition(b"\n")
    try:
        return _read_notes(notes), request
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the first line must be a list of a stream's notes: {error}", "notes") from None
