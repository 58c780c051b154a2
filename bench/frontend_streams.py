"""Many streamed chats over plain sockets, and when the tokens of each have arrived. The client must not be what is measured."""

import json
import re
import selectors
import socket
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import tokenizers

_EVENT = re.compile(rb"data: (\{.*?\})\n\n")
RECEIVE = 1 << 16
CONNECTING_PAUSE = 0.002
"""Seconds between two requests, so that 1,000 at once do not overflow what waits to be accepted."""


@dataclass
class Stream:
    """Keeps what one stream received: all of its bytes, and at which of them each arrival ended."""

    data: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        self.times.append(time.monotonic())
        self.data += data
        self.ends.append(len(self.data))

    def time_of(self, end: int) -> float:
        """Returns when the byte before `end` arrived."""
        return self.times[bisect_left(self.ends, end)]


@dataclass(frozen=True)
class Reading:
    """`sent` is when the core sent each token, the same for all streams; `cpu_seconds` the server's from the first token on."""

    streams: list[Stream]
    sent: list[float]
    cpu_seconds: float


def read_streams(port: int, count: int, body: bytes, control: Connection, cpu_seconds: Callable[[], float]) -> Reading:
    """Sends `count` requests and reads their answers; the core begins when it has all of them."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    request = head.encode() + b"Connection: close\r\n\r\n" + body
    waiting = selectors.DefaultSelector()
    streams = []
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        streams.append(Stream())
        waiting.register(connection, selectors.EVENT_READ, streams[-1])
        time.sleep(CONNECTING_PAUSE)
    if not control.poll(120):
        raise SystemExit("the core did not get all requests")
    control.recv()  # the steps begin in a moment
    before = cpu_seconds()
    _read_all(waiting)
    used = cpu_seconds() - before
    return Reading(streams, control.recv(), used)


def _read_all(waiting: selectors.BaseSelector) -> None:
    while waiting.get_map():
        for key, _ in waiting.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if data := connection.recv(RECEIVE):
                key.data.add(data)
            else:
                waiting.unregister(connection)
                connection.close()


@dataclass(frozen=True)
class Timing:
    """Seconds from the core's delivery on.

    first   from the first token to the first event
    events  from an event's last token to the event, for those with text
    tokens  from each token to its last character; what may begin a marker, or be a comma before an end, waits for the next one
    """

    first: float
    events: list[float]
    tokens: list[float]


@dataclass(frozen=True)
class Timeline:
    """Tells where the output's tokens end in its text, and which of them a client sees whether the output is split or not.

    `parts` are the places where reasoning, content and the arguments of each call begin.
    """

    text: str
    parts: dict[object, int]
    ends: list[int]
    seen: list[int]

    def lateness(self, stream: Stream, sent: list[float], *, is_split: bool) -> Timing:
        arrived: dict[int, float] = {}
        """When the character before an offset of the text arrived."""
        places = dict(self.parts) if is_split else {"content": 0}
        events, first = list[float](), 0.0
        for match in _EVENT.finditer(stream.data):
            at = stream.time_of(match.end())
            first = first or at
            delta = json.loads(match[1])["choices"][0]["delta"]
            for part, text in _texts(delta):
                begin, places[part] = places[part], places[part] + len(text)
                assert self.text.startswith(text, begin), f"{text!r} is not what was written"
                arrived |= dict.fromkeys(range(begin + 1, begin + len(text) + 1), at)
                events.append(at - sent[bisect_left(self.ends, begin + len(text))])
        missing = [i for i in self.seen if self.ends[i] not in arrived]
        if missing or b"[DONE]" not in stream.data[-64:]:
            raise SystemExit(f"a stream is not whole, {len(missing)} tokens are missing: {bytes(stream.data[:300])!r}")
        return Timing(first - sent[0], events, [arrived[self.ends[i]] - sent[i] for i in self.seen])


def _texts(delta: dict[str, object]) -> list[tuple[object, str]]:
    calls = delta.get("tool_calls") or []
    assert isinstance(calls, list)
    texts: list[tuple[object, str]] = [(call["index"], str(call["function"].get("arguments") or "")) for call in calls]
    texts += [(part, str(delta.get(part) or "")) for part in ("reasoning", "content")]
    return [(part, text) for part, text in texts if text]


def shown_tokens(tokenizer: tokenizers.Tokenizer, output: list[int], text: str, parts: dict[object, str]) -> Timeline:
    """Returns the timeline of an output that is ASCII, and whose parts stand in it as they are sent."""
    ends = [len(tokenizer.decode(output[: i + 1], skip_special_tokens=False)) for i in range(len(output))]
    begins = {part: text.index(one) for part, one in parts.items()}
    seen = [i for i, end in enumerate(ends) if any(begins[part] < end <= begins[part] + len(parts[part]) for part in parts)]
    return Timeline(text, begins, ends, seen)
