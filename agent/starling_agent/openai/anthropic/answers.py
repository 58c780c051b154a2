"""Answers of the Messages API, whole and as events."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from pydantic_core import from_json
from starling_engine.outputs import FinishReason, OutputDelta

from starling_agent.openai.answer_parts import AnswerReader, CallPiece, Piece, ToolCall
from starling_agent.openai.collecting import Collected
from starling_agent.openai.event_stream import sse
from starling_agent.openai.generation import Generation, PromptDelta, TokenCount
from starling_agent.openai.stream_batcher import StreamBatcher
from starling_agent.parsers.events import Content, Reasoning
from starling_agent.parsers.json_text import is_whole_json

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(msgspec.Struct):
    """`input_tokens` are those of the prompt that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: None = None


class Message(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, object]]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class TokenCountAnswer(msgspec.Struct):
    input_tokens: int


def whole_message(generation: Generation, collected: Collected, *, ends_with_context: bool, omits_thinking: bool) -> Message:
    """Makes the answer. `ends_with_context` says that the model's context ends before the tokens that the request allows.

    With `omits_thinking` the blocks of thinking are there, without their text.
    """
    choice = collected.choices[0]
    usage = collected.usage
    cached = usage.prompt_tokens_details.cached_tokens
    reason, sequence = _stop(choice.ended_by, choice.stop_reason, ends_with_context=ends_with_context)
    return Message(
        id=generation.answer_id,
        model=generation.model,
        content=[_block(part, omits_thinking) for part in choice.parts.blocks],
        stop_reason=reason,
        stop_sequence=sequence,
        usage=MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached),
    )


class MessageStream:
    """Makes the events of an answer's deltas."""

    def __init__(self, generation: Generation, batcher: StreamBatcher, *, ends_with_context: bool, omits_thinking: bool) -> None:
        """Takes what `whole_message` does."""
        self._generation = generation
        self._batcher = batcher
        self._ends_with_context = ends_with_context
        self._omits_thinking = omits_thinking
        self._reader = AnswerReader(generation.reading)
        self._count = generation.token_count()
        self._open: str | int | None = None
        """The block that is open: text, thinking, or the number of a call."""
        self._blocks = 0
        self._thinking = hashlib.sha256()

    async def chunks(self, deltas: AsyncGenerator[PromptDelta]) -> AsyncGenerator[bytes]:
        """Yields all events."""
        with self._batcher.open_stream():
            async with aclosing(deltas):
                begun = False
                async for prompt, delta in deltas:
                    self._count.add(prompt, delta, only_echo=False)
                    events = [] if begun else [self._start()]
                    begun = True
                    for output in delta.outputs:
                        events += self._events(output)
                    yield b"".join(events)
                    await self._batcher.pause()

    def _start(self) -> bytes:
        message = Message(id=self._generation.answer_id, model=self._generation.model, content=[], usage=_usage(self._count, 0))
        return sse("message_start", {"message": message}) + sse("ping", {})

    def _events(self, output: OutputDelta) -> list[bytes]:
        events = [written for piece in self._reader.read(output) for written in self._piece(piece)]
        if output.finish_reason is None:
            return events
        ended = self._reader.ended_by(output.finish_reason)
        reason, sequence = _stop(ended, output.stop_reason, ends_with_context=self._ends_with_context)
        last = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": _usage(self._count, self._count.completion)}
        return [*events, *self._close(), sse("message_delta", last), sse("message_stop", {})]

    def _piece(self, piece: Piece) -> list[bytes]:
        match piece:
            case Content(text):
                return [*self._begin("text", _text_block("")), self._delta({"type": "text_delta", "text": text})]
            case Reasoning(text):
                self._thinking.update(text.encode(errors="replace"))
                begun = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return begun if self._omits_thinking else [*begun, self._delta({"type": "thinking_delta", "thinking": text})]
            case CallPiece(index, arguments, call_id, name):
                begun = self._begin(index, _call_block(call_id, name, {}))
                return begun + ([self._delta({"type": "input_json_delta", "partial_json": arguments})] if arguments else [])

    def _begin(self, kind: str | int, block: dict[str, object]) -> list[bytes]:
        if kind == self._open:
            return []
        closed = self._close()
        self._open = kind
        return [*closed, sse("content_block_start", {"index": self._blocks, "content_block": block})]

    def _delta(self, delta: dict[str, object]) -> bytes:
        return sse("content_block_delta", {"index": self._blocks, "delta": delta})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": self._thinking.hexdigest()}))
            self._thinking = hashlib.sha256()
        events.append(sse("content_block_stop", {"index": self._blocks}))
        self._open = None
        self._blocks += 1
        return events


def _block(part: Content | Reasoning | ToolCall, omits_thinking: bool) -> dict[str, object]:
    match part:
        case Content(text):
            return _text_block(text)
        case Reasoning(text):
            signature = hashlib.sha256(text.encode(errors="replace")).hexdigest()
            return {"type": "thinking", "thinking": "" if omits_thinking else text, "signature": signature}
        case ToolCall():
            return _call_block(part.id, part.name, _arguments(part.arguments))


def _arguments(text: str) -> object:
    """Returns the arguments; of a call that was cut those that are there, as the SDK reads them of a stream.

    Where it would raise, for more than 200 levels or a half of a character, there are none.
    """
    if is_whole_json(text):
        return msgspec.Raw(text.encode())
    try:
        return from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}


def _text_block(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "citations": None}


def _call_block(call_id: str | None, name: str | None, arguments: object) -> dict[str, object]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _usage(count: TokenCount, output: int) -> MessageUsage:
    return MessageUsage(count.prompt - count.cached, output, count.cached)


def _stop(
    reason: FinishReason | Literal["tool_calls"] | None, stop: int | str | None, *, ends_with_context: bool
) -> tuple[StopReason | None, str | None]:
    match reason:
        case None:
            return None, None
        case "length":
            return "model_context_window_exceeded" if ends_with_context else "max_tokens", None
        case "stop" if isinstance(stop, str):
            return "stop_sequence", stop
    return ("tool_use" if reason == "tool_calls" else "end_turn"), None
