"""Counts the tokens of answers as they pass, without reading their events."""

import re
from typing import Annotated

import msgspec

TAIL_BYTES = 4096
"""The usage stands at an answer's end."""
HEAD_BYTES = 512
_BACKGROUND = re.compile(rb'[{]"id":"([^"]+)","object":"response",(?:[^{}]*,)?"background":true')
"""An agent writes these fields first, and before all of a client's."""
_EVENT = b"\ndata: {"
_USAGE = b'"usage":'
"""Agents write it last of an object's fields, as clients have a say in others: a tool's schema may have a `usage`, too."""
_OBJECT = rb" ?([{](?:[^{}]++|[{][^{}]*+[}])*+[}])[}]*+"
_LAST_OF_BODY = re.compile(_OBJECT + rb"\s*")
_LAST_OF_STREAM = re.compile(_OBJECT + rb'\s*\n\n(?:data: \[DONE\]\s*|event: message_stop\s+data: [{]"type":"message_stop"[}]\s*)?')
"""Events behind the usage are only those that end a stream: one that says more counts by itself."""

Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _Cached(msgspec.Struct):
    cached_tokens: Tokens = 0


class _Usage(msgspec.Struct):
    """A usage of any API. Anthropic's `input_tokens` are without the cached ones, which OpenAI's are with."""

    prompt_tokens: Tokens = 0
    input_tokens: Tokens = 0
    completion_tokens: Tokens = 0
    output_tokens: Tokens = 0
    cache_read_input_tokens: Tokens = 0
    prompt_tokens_details: _Cached | None = None
    input_tokens_details: _Cached | None = None

    @property
    def prompt(self) -> int:
        return self.prompt_tokens + self.input_tokens + self.cache_read_input_tokens

    @property
    def output(self) -> int:
        return self.completion_tokens + self.output_tokens

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details or self.input_tokens_details
        return self.cache_read_input_tokens + (0 if details is None else details.cached_tokens)


_DECODER = msgspec.json.Decoder(_Usage)


class AnswerUsage:
    """The tokens of one answer.

    output   tokens given so far, as notes count them, else one for each event of a stream; until the usage at the end says it
    prompt   tokens of the prompt, and cached ones among them; None: the answer has not said it
    streams  it is a stream of events
    """

    def __init__(self, *, streams: bool) -> None:
        self.output = 0
        self.prompt: int | None = None
        self.cached = 0
        self.streams = streams
        self._head, self._tail = b"", b"\n"
        self._is_noted = False

    def gained(self, tokens: int) -> None:
        """Takes the tokens that the notes of a stream have counted so far. Its events may show fewer, or several at a time."""
        self.output, self._is_noted = tokens, True

    def take(self, chunk: bytes) -> None:
        """Counts a chunk, which may be any part of the answer."""
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[:HEAD_BYTES]
        data = self._tail + chunk
        if self.streams and not self._is_noted:
            self.output += data.count(_EVENT, max(0, len(self._tail) - len(_EVENT) + 1))
        self._tail = data[-TAIL_BYTES:]

    @property
    def background_id(self) -> str | None:
        """The id of the response in the background that the answer is, from its beginning on."""
        found = _BACKGROUND.search(self._head)
        return None if found is None else found[1].decode()

    def end(self, *, whole: bool) -> None:
        """Takes what the usage at the answer's end says, if it has one. Where a body was cut, its end is anything."""
        if not whole and not self.streams:
            return
        form = _LAST_OF_STREAM if self.streams else _LAST_OF_BODY
        if (found := form.fullmatch(self._tail.rpartition(_USAGE)[2])) is None:
            return
        try:
            usage = _DECODER.decode(found[1])
        except msgspec.DecodeError:
            return
        self.output, self.prompt, self.cached = usage.output, usage.prompt, usage.cached
