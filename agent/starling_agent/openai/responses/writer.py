"""Writes a response: its items as they grow, and the events that say so. Whole answers are those of the last event."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starling_engine.outputs import FinishReason

from starling_agent.http.errors import ApiError
from starling_agent.openai.answer_parts import CallPiece, Piece
from starling_agent.openai.event_stream import sse
from starling_agent.openai.protocol.answers import ChatLogprob
from starling_agent.openai.responses.conversion import CUSTOM_INPUT
from starling_agent.parsers.events import Content, Reasoning
from starling_agent.parsers.json_text import valid_text, whole_json

Fields = dict[str, Any]


class ResponseWriter:
    """The response of one request. `custom` are the tools whose calls are texts."""

    def __init__(self, response: Fields, custom: frozenset[str]) -> None:
        self.response = response
        self._custom = custom
        self._sequence = 0
        self._open: tuple[type[Piece], int | None] | None = None
        self._text: list[str] = []
        """The text of the open item."""
        self._logprobs: list[ChatLogprob] = []

    @property
    def reasoning(self) -> str:
        items = (item for item in self.response["output"] if item["type"] == "reasoning")
        return "".join(part["text"] for item in items for part in item["content"])

    def begin(self) -> bytes:
        """Returns the first events."""
        return self._lifecycle("created") + self._lifecycle("in_progress")

    def piece(self, piece: Piece, logprobs: Sequence[ChatLogprob] = ()) -> bytes:
        """Adds a piece; returns its events."""
        kind = (type(piece), piece.index if isinstance(piece, CallPiece) else None)
        events = b"" if kind == self._open else self._end_item("completed") + self._begin_item(piece)
        self._open = kind
        match piece:
            case Content(text):
                self._logprobs += logprobs
                return events + self._grow("response.output_text.delta", text, content_index=0, logprobs=list(logprobs))
            case Reasoning(text):
                return events + self._grow("response.reasoning_text.delta", text, content_index=0)
            case CallPiece(_, arguments):
                if self._item["type"] == "custom_tool_call":
                    self._text.append(arguments)  # the text in it is known at its end
                    return events
                return events + (self._grow("response.function_call_arguments.delta", arguments) if arguments else b"")

    def end_item(self, reason: FinishReason) -> bytes:
        """Ends the last item; returns its last events."""
        return self._end_item("completed" if reason == "stop" else "incomplete")

    def finish(self, reason: FinishReason, usage: Fields) -> bytes:
        """Ends the response, whose last item has ended; returns the last event."""
        is_cut = reason != "stop"
        self.response |= {"status": "incomplete" if is_cut else "completed", "usage": usage}
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif not is_cut:
            self.response["completed_at"] = int(time.time())
        return self._lifecycle(self.response["status"])

    def fail(self, error: ApiError) -> bytes:
        """Ends the response with an error; returns the last events."""
        events = self._end_item("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.detail.message}}
        return events + self._lifecycle("failed")

    # ---- items ----

    @property
    def _item(self) -> Fields:
        item: Fields = self.response["output"][-1]
        return item

    @property
    def _place(self) -> Fields:
        return {"item_id": self._item["id"], "output_index": len(self.response["output"]) - 1}

    def _begin_item(self, piece: Piece) -> bytes:
        item = self._new_item(piece)
        self._text, self._logprobs = [], []
        self.response["output"].append(item)
        events = self._event("response.output_item.added", output_index=self._place["output_index"], item=item)
        match piece:
            case Content():
                return events + self._part("added", _output_text(""))
            case Reasoning():
                return events + self._part("added", {"type": "reasoning_text", "text": ""})
        return events

    def _new_item(self, piece: Piece) -> Fields:
        match piece:
            case Content():
                return {"id": _id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
            case Reasoning():
                return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
            case CallPiece(_, _, call_id, name):
                if name in self._custom:
                    return {"id": _id("ctc"), "type": "custom_tool_call", "call_id": call_id, "name": name, "input": ""}
                call = {"type": "function_call", "status": "in_progress", "call_id": call_id, "name": name, "arguments": ""}
                return {"id": _id("fc"), **call}

    def _end_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        text, item = "".join(self._text), self._item
        match item["type"]:
            case "message":
                part = _output_text(text, self._logprobs)
                item["content"] = [part]
                events = self._event(
                    "response.output_text.done", **self._place, content_index=0, text=text, logprobs=self._logprobs
                )
                events += self._part("done", part)
            case "reasoning":
                part = {"type": "reasoning_text", "text": text}
                item["content"] = [part]
                events = self._event("response.reasoning_text.done", **self._place, content_index=0, text=text)
                events += self._part("done", part)
            case "function_call":
                item["arguments"] = text
                events = self._event("response.function_call_arguments.done", **self._place, arguments=text)
            case _:
                item["input"] = _text_of_custom(text)
                events = self._event("response.custom_tool_call_input.delta", **self._place, delta=item["input"])
                events += self._event("response.custom_tool_call_input.done", **self._place, input=item["input"])
        if "status" in item:
            item["status"] = status
        return events + self._event("response.output_item.done", output_index=self._place["output_index"], item=item)

    # ---- events ----

    def _grow(self, name: str, delta: str, **more: Any) -> bytes:
        self._text.append(delta)
        return self._event(name, **self._place, delta=delta, **more)

    def _part(self, happened: str, part: Fields) -> bytes:
        return self._event(f"response.content_part.{happened}", **self._place, content_index=0, part=part)

    def _lifecycle(self, happened: str) -> bytes:
        return self._event(f"response.{happened}", response=self.response)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse(name, {"sequence_number": self._sequence - 1, **fields})


def _output_text(text: str, logprobs: Sequence[ChatLogprob] = ()) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _text_of_custom(arguments: str) -> str:
    """Returns the text of a call of a custom tool; of one that was cut, what there is of it."""
    try:
        value = json.loads(whole_json(arguments))
        return valid_text(str(value[CUSTOM_INPUT]))
    except (ValueError, TypeError, LookupError, RecursionError):
        return arguments


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
