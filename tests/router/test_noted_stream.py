"""Events that have their note, however the stream is cut."""

import pytest
from starling_agent.openai.stream_record import LAST_NOTE
from starling_router.noted_stream import NotedStream

STREAM = b'data: {"a": ": note "}\n\ndata: 2\n\n: note {"n":1}\n\ndata: 3\n\n: note {"n":2}\n\n: note {"n":3}\n\n' + LAST_NOTE
EVENTS = b'data: {"a": ": note "}\n\ndata: 2\n\ndata: 3\n\n'


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_the_events_are_those_of_the_stream(size: int) -> None:
    stream = NotedStream()
    events = b"".join(stream.take(STREAM[begin : begin + size]) for begin in range(0, len(STREAM), size))
    assert events == EVENTS
    assert stream.is_complete
    assert stream.record(b"body") == b'[{"n":1},{"n":2},{"n":3}]\nbody'


@pytest.mark.parametrize("cut", range(len(STREAM)))
def test_what_a_client_got_is_what_the_notes_say(cut: int) -> None:
    first, second = NotedStream(), NotedStream()
    events = first.take(STREAM[:cut])
    assert not first.is_complete
    whole = [(b'data: {"a": ": note "}\n\ndata: 2\n\n', b'{"n":1}'), (b"data: 3\n\n", b'{"n":2}'), (b"", b'{"n":3}')]
    count = next(n for n in range(4) if first.record(b"") == b"[" + b",".join(note for _, note in whole[:n]) + b"]\n")
    assert events == b"".join(part for part, _ in whole[:count])
    # Another backend goes on: what came without its note comes again.
    rest = b"".join(part + b": note " + note + b"\n\n" for part, note in whole[count:]) + LAST_NOTE
    assert events + first.take(rest) == EVENTS
    assert first.is_complete and second.record(b"x") == b"[]\nx"


def test_tokens_are_counted_by_the_notes_of_every_backend() -> None:
    stream = NotedStream()
    stream.take(
        b'data: 1\n\n: note {"gains":[[0,[5,6]],[1,[7]]],"ends":[],"stream":{"id":"a"}}\n\ndata: 2\n\n: note {"gains":[[0,[1'
    )
    assert stream.tokens == 3, "the second note has not come whole"
    stream.record(b"")
    stream.take(b'data: 2\n\n: note {"gains":[[0,[1,2,3]]],"prompts":[[0,4]]}\n\n' + LAST_NOTE)
    assert (stream.tokens, stream.is_complete) == (6, True)


def test_notes_of_a_stream_that_cannot_be_resumed_count_its_tokens() -> None:
    stream = NotedStream(resumes=False)
    assert stream.take(b'data: 1\n\n: note {"tokens":0}\n\ndata: 2\n\n: note {"tokens":7}\n\n') == b"data: 1\n\ndata: 2\n\n"
    assert stream.tokens == 7
    stream.take(b'data: 3\n\n: note {"tokens":9}\n\n' + LAST_NOTE)
    assert (stream.tokens, stream.is_complete) == (9, True)
    assert stream.record(b"body") == b"[]\nbody", "a note for each event would be kept to the end of the stream"
