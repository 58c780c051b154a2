"""Server-sent events of one answer. Constant parts are serialised once; a token costs one small encode."""

from dataclasses import dataclass

import msgspec

from starling_agent.openai.protocol.answers import Usage

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """Position of the text in a choice: the JSON before and after it."""

    object: str
    before_text: bytes
    after_text: bytes
    empty: bytes


CHAT = ChoiceShape("chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
COMPLETION = ChoiceShape("text_completion", b'"text":', b"", b'"text":""')


class ChunkWriter:
    """Writes the chunks of one answer with any number of choices.

    `usage_field`: all chunks have `"usage": null`, as OpenAI's do when the request includes usage.
    """

    def __init__(self, shape: ChoiceShape, answer_id: str, created: int, model: str, usage_field: bool) -> None:
        self._shape = shape
        self._head = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"choices":[' % (
            _encode(answer_id),
            _encode(shape.object),
            created,
            _encode(model),
        )
        self._tail = b'],"usage":null}\n\n' if usage_field else b"]}\n\n"
        self._plain_end = shape.after_text + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._openings: dict[int, bytes] = {}
        self._call_openings: dict[tuple[int, int], bytes] = {}
        self._arguments_end = b"}}]" + self._plain_end

    def role(self, index: int, prompt_ids: list[int] | None) -> bytes:
        """Returns the first chunk of a chat's choice, with the prompt's token ids if given."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        tail = self._tail if prompt_ids is None else b'],"prompt_token_ids":' + _encode(prompt_ids) + self._tail[1:]
        return self._head + choice + tail

    def text(self, index: int, text: str) -> bytes:
        """Returns a chunk with text alone; nearly all chunks are such."""
        return self._opening(index) + self._shape.before_text + _encode(text) + self._plain_end

    def reasoning(self, index: int, text: str) -> bytes:
        """Returns a chunk of a chat with reasoning alone, under both of its names."""
        encoded = _encode(text)
        delta = b'"delta":{"reasoning":' + encoded + b',"reasoning_content":' + encoded
        return self._opening(index) + delta + self._plain_end

    def arguments(self, index: int, call: int, text: str) -> bytes:
        """Returns a chunk of a chat with a piece of the arguments of call number `call` alone."""
        opening = self._call_openings.get((index, call))
        if opening is None:
            delta = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":' % call
            opening = self._call_openings[index, call] = self._opening(index) + delta
        return opening + _encode(text) + self._arguments_end

    def rich_text(self, index: int, text: str, *, logprobs: object, extra: dict[str, object], usage: Usage | None) -> bytes:
        """Returns a chunk with more than text: log probabilities, `extra` fields of the choice, the usage up to here."""
        choice = b"%s,%s" % (self._shape.after_text, _fields({"logprobs": logprobs, "finish_reason": None, **extra}))
        return self._opening(index) + self._shape.before_text + _encode(text) + choice + b"}" + self._end(usage)

    def delta(self, index: int, delta: object, *, logprobs: object, extra: dict[str, object], usage: Usage | None) -> bytes:
        """Returns a chunk of a chat with any delta."""
        choice = _fields({"delta": delta, "logprobs": logprobs, "finish_reason": None, **extra})
        return self._opening(index) + choice + b"}" + self._end(usage)

    def finish(self, index: int, reason: str, stop_reason: int | str | None, usage: Usage | None) -> bytes:
        """Returns the last chunk of a choice; its delta is empty."""
        ends = _fields({"logprobs": None, "finish_reason": reason, "stop_reason": stop_reason})
        return b"%s%s,%s}%s" % (self._opening(index), self._shape.empty, ends, self._end(usage))

    def usage(self, usage: Usage) -> bytes:
        """Returns the chunk without choices that ends a stream with `include_usage`."""
        return self._head + self._end(usage)

    def _opening(self, index: int) -> bytes:
        """Returns all that is before the text of a choice's chunk, or before its delta."""
        opening = self._openings.get(index)
        if opening is None:
            opening = self._openings[index] = self._head + b'{"index":%d,' % index
        return opening

    def _end(self, usage: Usage | None) -> bytes:
        return self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}\n\n"


def _fields(values: dict[str, object]) -> bytes:
    return b",".join(_encode(name) + b":" + _encode(value) for name, value in values.items())
