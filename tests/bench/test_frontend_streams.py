"""When did the tokens of a streamed output arrive?"""

import json

import pytest

from bench.frontend_streams import Stream, Timeline

TEXT = '<think>\nI look.\n</think>\n\nSo.\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
PARTS = {"reasoning": "I look.", "content": "So.", 0: '{"command": "ls"}'}
BEGINS = {part: TEXT.index(text) for part, text in PARTS.items()}
SEEN = [i for part, text in PARTS.items() for i in range(BEGINS[part], BEGINS[part] + len(text))]
TIMELINE = Timeline(TEXT, BEGINS, [*range(1, len(TEXT) + 1)], SEEN)
"""Each character is a token."""
SENT = [float(i) for i in range(len(TEXT))]
LATE = 0.25


def received(*arrivals):
    """Returns a stream of (time, deltas)."""
    stream = Stream()
    for at, *deltas in arrivals:
        for delta in deltas:
            stream.data += f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode()
        stream.ends.append(len(stream.data))
        stream.times.append(at)
    stream.data += b"data: [DONE]\n\n"
    return stream


def test_tokens_of_each_part_are_found_where_they_stand():
    last = {part: SENT[BEGINS[part] + len(text) - 1] + LATE for part, text in PARTS.items()}
    call = (
        [{"index": 0, "function": {"name": "run", "arguments": '{"'}}],
        [{"index": 0, "function": {"arguments": 'command": "ls"}'}}],
    )
    split = received(
        (LATE, {"role": "assistant", "content": ""}),
        (last["reasoning"], {"reasoning": "I ", "reasoning_content": "I "}, {"reasoning": "look.", "reasoning_content": "look."}),
        (last["content"], {"content": "So."}),
        (last[0], {"tool_calls": call[0]}, {"tool_calls": call[1]}),
    )
    timing = TIMELINE.lateness(split, SENT, is_split=True)
    assert timing.first == LATE
    pieces = [("reasoning", 2), ("reasoning", 7), ("content", 3), (0, 2), (0, len(PARTS[0]))]
    assert timing.events == [last[part] - SENT[BEGINS[part] + length - 1] for part, length in pieces]
    counts = [range(len(text) - 1, -1, -1) for text in PARTS.values()]
    assert timing.tokens == [LATE + before for count in counts for before in count]


def test_plain_text_is_one_part():
    plain = received(*((sent + LATE, {"content": character}) for sent, character in zip(SENT, TEXT, strict=True)))
    assert TIMELINE.lateness(plain, SENT, is_split=False).tokens == [LATE] * len(SEEN)


def test_a_stream_without_a_token_is_not_measured():
    with pytest.raises(SystemExit, match="not whole"):
        TIMELINE.lateness(received((0.0, {"content": TEXT[:40]})), SENT, is_split=False)
