"""Writes a response: its items as they grow, and the events that say so. Whole answers are those of the last event."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starling_engine.outputs import FinishReason

from starling_agent.http.errors import ApiError
from starling_agent.openai.answer_parts import CallPiece, Piece
from starling_agent.openai.event_stream import sse
from starling_agent.openai.protocol.answers import ChatLogprob
from starling_agent.openai.responses.conversion import OwnTool
from starling_agent.openai.responses.store import RUNNING
from starling_agent.parsers.events import Content, Reasoning

Fields = dict[str, Any]


class ResponseWriter:
    """The response of one request. `tools` has what the request calls them, by the model's names."""

    def __init__(self, response: Fields, tools: Mapping[str, OwnTool]) -> None:
        self.response = response
        self._tools = tools
        self._sequence = 0
        self._has_last = False
        self._open: tuple[type[Piece], int | None] | None = None
        self._text: list[str] = []
        """The text of the open item."""
        self._logprobs: list[ChatLogprob] = []

    @property
    def has_ended(self) -> bool:
        return self.response["status"] not in RUNNING

    def queue(self) -> bytes:
        """Returns the first events of a response that is made in the background."""
        self.response["status"] = "queued"
        return self._lifecycle("created") + self._lifecycle("queued")

    def begin(self) -> bytes:
        """Returns the events before the first piece, which are the first ones unless it was queued."""
        self.response["status"] = "in_progress"
        created = b"" if self._sequence else self._lifecycle("created")
        return created + self._lifecycle("in_progress")

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
            case CallPiece(_, arguments, is_custom=is_custom):
                name = "custom_tool_call_input" if is_custom else "function_call_arguments"
                return events + (self._grow(f"response.{name}.delta", arguments) if arguments else b"")

    def end(self, reason: FinishReason, usage: Fields) -> bytes:
        """Ends the response; returns the last events but one, which is `last_event`."""
        is_cut = reason != "stop"
        events = self._end_item("incomplete" if is_cut else "completed")
        self.response |= {"status": "incomplete" if is_cut else "completed", "usage": usage}
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif not is_cut:
            self.response["completed_at"] = int(time.time())
        return events

    def last_event(self) -> bytes:
        """Returns the event of the response that has ended."""
        self._has_last = True
        return self._lifecycle(self.response["status"])

    def cancel(self) -> bytes:
        """Ends the response, unless it has ended, as cancelled; returns the last events. There is none that says so."""
        if self.has_ended:
            return self._rest()
        events = self._end_item("incomplete")
        self.response["status"] = "cancelled"
        return events

    def fail(self, error: ApiError) -> bytes:
        """Ends the response, unless it has ended, with an error; returns the last events."""
        if self.has_ended:
            return self._rest()
        events = self._end_item("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error.detail.message}}
        return events + self.last_event()

    def snapshot(self) -> Fields:
        """Returns the response with the text that its open item has yet."""
        if self._open is None:
            return self.response
        return {**self.response, "output": [*self.response["output"][:-1], self._item | self._filling("".join(self._text))]}

    def _rest(self) -> bytes:
        return b"" if self._has_last else self.last_event()

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
            case CallPiece(_, _, call_id, name, is_custom):
                own = self._tools.get(name or "", OwnTool(name or "", None))
                called = {"call_id": call_id, "name": own.name} | ({"namespace": own.namespace} if own.namespace else {})
                if is_custom:
                    return {"id": _id("ctc"), "type": "custom_tool_call", **called, "input": ""}
                return {"id": _id("fc"), "type": "function_call", "status": "in_progress", **called, "arguments": ""}

    def _end_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        text, item = "".join(self._text), self._item
        item |= self._filling(text)
        match item["type"]:
            case "message":
                events = self._event(
                    "response.output_text.done", **self._place, content_index=0, text=text, logprobs=self._logprobs
                )
                events += self._part("done", item["content"][0])
            case "reasoning":
                events = self._event("response.reasoning_text.done", **self._place, content_index=0, text=text)
                events += self._part("done", item["content"][0])
            case "function_call":
                events = self._event("response.function_call_arguments.done", **self._place, arguments=text)
            case _:
                events = self._event("response.custom_tool_call_input.done", **self._place, input=text)
        if "status" in item:
            item["status"] = status
        return events + self._event("response.output_item.done", output_index=self._place["output_index"], item=item)

    def _filling(self, text: str) -> Fields:
        """Returns the fields of the last item that have its text."""
        match self._item["type"]:
            case "message":
                return {"content": [_output_text(text, self._logprobs)]}
            case "reasoning":
                return {"content": [{"type": "reasoning_text", "text": text}]}
            case "function_call":
                return {"arguments": text}
        return {"input": text}

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


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
