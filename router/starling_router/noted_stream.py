"""A stream that another backend can go on with, by the notes that agents write between its events.

A note says of all events before it what they are. Agents alone know how; here its tokens are counted.
"""

import msgspec
from starling_agent.openai.stream_record import LAST_NOTE, NOTE_BEGIN, NOTE_END, GainNote

from starling_router.upstream import check_unfinished

_BEGIN = b"\n" + NOTE_BEGIN
"""Begins a line, which no text within an event does."""
_LAST = LAST_NOTE.removeprefix(NOTE_BEGIN).removesuffix(NOTE_END)


class _Gains(msgspec.Struct):
    """Tokens of a note: gained since the one before it, or in all."""

    gains: list[GainNote] = []
    tokens: int = 0


_read_gains = msgspec.json.Decoder(_Gains).decode


class NotedStream:
    """The events of one request's answer, which come from one backend after the other.

    resumes      another backend may go on with it; else its notes are not kept
    is_complete  all has come: nobody has to go on with it
    tokens       that its choices have gained, whatever events show of them
    """

    def __init__(self, *, resumes: bool = True) -> None:
        self.resumes = resumes
        self.is_complete = False
        self.tokens = 0
        self._notes: list[bytes] = []
        self._held, self._searched = bytearray(b"\n"), 0
        """Events whose note has not come, behind the end of the line before them, and where in them it may begin."""

    def take(self, chunk: bytes) -> bytes:
        """Returns the events that a client may have, now that `chunk` came: those that have a note behind them.

        Raises ApiError where too much comes without one.
        """
        held, came, done = self._held, len(self._held) - 1, 0
        events: list[bytearray] = []
        held += chunk
        begin = held.find(_BEGIN, self._searched)
        while begin >= 0 and (end := held.find(NOTE_END, max(begin, came))) >= 0:
            events.append(held[done + 1 : begin + 1])
            note = bytes(held[begin + len(_BEGIN) : end])
            if note == _LAST:
                self.is_complete = True
            else:
                if self.resumes:
                    self._notes.append(note)
                read = _read_gains(note)
                self.tokens = max(self.tokens + sum(len(gain.tokens) for gain in read.gains), read.tokens)
            done = end + len(NOTE_END) - 1
            begin = held.find(_BEGIN, done)
        self._searched = max(0, (begin if begin >= 0 else len(held) - len(NOTE_BEGIN)) - done)
        del held[:done]
        check_unfinished(held)
        return b"".join(events)

    def record(self, body: bytes) -> bytes:
        """Returns the body by which the next backend goes on with the request of `body`. What came without a note is left out."""
        self._held, self._searched = bytearray(b"\n"), 0
        return b"[%s]\n%s" % (b",".join(self._notes), body)
