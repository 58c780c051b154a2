"""Joins the chunks of a streamed answer into the message that the history gets."""

import uuid
from typing import Any

from starling_agent.parsers.events import Content, Reasoning

Message = dict[str, Any]
"""A message as OpenAI's API has it."""
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Names that servers have for reasoning; some send the same text under both."""


class StreamedAnswer:
    """An answer that is being read."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._reasoning_field = ""
        self._calls: list[Message] = []
        self._by_index: dict[int, Message] = {}
        """The newest call of each index."""

    def add(self, chunk: Message) -> list[Content | Reasoning]:
        """Takes a chunk. Returns what of it is shown while it comes; calls are shown when they are whole."""
        choices = chunk.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        pieces: list[Content | Reasoning] = []
        for field in REASONING_FIELDS:
            if text := delta.get(field):
                self._reasoning_field = field
                self._reasoning.append(str(text))
                pieces.append(Reasoning(str(text)))
                break
        if text := delta.get("content"):
            self._content.append(str(text))
            pieces.append(Content(str(text)))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            self._add_call(call, position)
        return pieces

    def message(self) -> Message:
        """Returns the whole message.

        Reasoning stays only beside calls, under the server's own name for it: models go on from it when the results come.
        """
        content = "".join(self._content)
        if not self._calls:
            return {"role": "assistant", "content": content}
        reasoning = {self._reasoning_field: "".join(self._reasoning)} if self._reasoning else {}
        return {"role": "assistant", "content": content or None, **reasoning, "tool_calls": [_whole(call) for call in self._calls]}

    def _add_call(self, piece: Message, position: int) -> None:
        """Adds a piece of a call. Only its first piece has an id, and some servers give all calls one index, or none."""
        index = piece.get("index")
        index = position if index is None else int(index)
        call = self._by_index.get(index)
        if call is None or (piece.get("id") and call["id"] and piece["id"] != call["id"]):
            call = self._by_index[index] = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            self._calls.append(call)
        function = piece.get("function") or {}
        call["id"] = call["id"] or piece.get("id") or ""
        call["function"]["name"] = call["function"]["name"] or function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _whole(call: Message) -> Message:
    """Returns a call with what its server has left out: an id, and the arguments of a function without any."""
    function = call["function"]
    return {
        **call,
        "id": call["id"] or f"call_{uuid.uuid4().hex[:24]}",
        "function": {**function, "arguments": function["arguments"] or "{}"},
    }
