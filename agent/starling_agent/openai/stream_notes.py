"""Writes notes for a router between the events of a stream, and leaves out events that the stream had elsewhere."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from starling_engine.outputs import StreamDelta

from starling_agent.http.errors import ApiError
from starling_agent.openai.event_stream import ErrorEvent
from starling_agent.openai.generation import Generation, PromptDelta
from starling_agent.openai.stream_record import (
    LAST_NOTE,
    NOTE_BEGIN,
    NOTE_END,
    CountNote,
    EndNote,
    GainNote,
    Note,
    PromptNote,
    StreamNote,
    StreamRecord,
)

CURED_ELSEWHERE = frozenset({"engine_dead", "shutting_down"})
"""Codes of errors that are this server's, and not the request's."""

_encode = msgspec.json.Encoder().encode


class StreamNotes:
    """Stands on both sides of what makes chunks of deltas, one after the other: `read` in front of it, `write` behind it."""

    def __init__(self, generation: Generation, record: StreamRecord) -> None:
        self._n = generation.params.n
        self._counts_drafts = generation.prediction is not None
        self._note = Note([])
        if not record.earlier:
            self._note.stream = StreamNote(generation.answer_id, generation.created, list(record.seeds))
        self._counts: dict[int, PromptNote] = {}
        self._replayed = False
        """The delta that was read last was streamed elsewhere."""

    async def read(self, deltas: AsyncGenerator[PromptDelta]) -> AsyncGenerator[PromptDelta]:
        async with aclosing(deltas):
            async for prompt, delta in deltas:
                self._replayed = delta.replayed
                self._count(prompt, delta)
                if not delta.replayed:
                    self._add(prompt, delta)
                yield prompt, delta

    async def write(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            async for chunk in chunks:
                if not self._replayed:
                    yield chunk + self._taken()
        yield LAST_NOTE

    def error_event(self, event: ErrorEvent) -> ErrorEvent:
        """Returns what ends the stream with an error: nothing where another server can go on with it."""

        def write(error: ApiError) -> bytes:
            return b"" if error.detail.code in CURED_ELSEWHERE else event(error) + LAST_NOTE

        return write

    def _add(self, prompt: int, delta: StreamDelta) -> None:
        for output in delta.outputs:
            choice = prompt * self._n + output.index
            self._note.gains.append(GainNote(choice, output.token_ids))
            if output.finish_reason is not None:
                self._note.ends.append(EndNote(choice, output.finish_reason, output.stop_reason))

    def _count(self, prompt: int, delta: StreamDelta) -> None:
        drafts = delta.drafts
        counts = PromptNote(prompt, delta.num_cached_tokens, *((drafts.proposed, drafts.accepted) if self._counts_drafts else ()))
        if counts != self._counts.get(prompt):
            self._counts[prompt] = counts
            if not delta.replayed:
                self._note.prompts.append(counts)

    def _taken(self) -> bytes:
        note, self._note = self._note, Note([])
        return NOTE_BEGIN + _encode(note) + NOTE_END


async def counted(chunks: AsyncGenerator[bytes], tokens: Callable[[], int]) -> AsyncGenerator[bytes]:
    """Writes behind each chunk how many tokens there are by then, into a stream that cannot be resumed."""
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk + NOTE_BEGIN + _encode(CountNote(tokens())) + NOTE_END
    yield LAST_NOTE
