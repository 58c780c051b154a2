"""The making of one response, from the deltas of its generation."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import msgspec
from starling_engine.outputs import FinishReason, OutputDelta

from starling_agent.openai.answer_parts import AnswerReader, Piece
from starling_agent.openai.endpoint import Caller, Endpoint
from starling_agent.openai.generation import Generation, PromptDelta
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.protocol.answers import ChatLogprob
from starling_agent.openai.responses.conversion import custom_tools, input_items
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.responses.store import StoredResponse
from starling_agent.openai.responses.writer import ResponseWriter
from starling_agent.parsers.events import Reasoning


class ResponseRun:
    """The making of one response."""

    def __init__(
        self, endpoint: Endpoint, generation: Generation, body: ResponsesRequest, caller: Caller, earlier: list[Any]
    ) -> None:
        self.writer = ResponseWriter(_response(generation, body), custom_tools(body))
        self._endpoint = endpoint
        self._generation = generation
        self._body = body
        self._owner = caller.owner
        self._earlier = earlier
        self._reader = AnswerReader(generation.reading)
        self._logprobs = LogprobWriter(endpoint.engine.tokenizer, generation.tokens_as_ids)
        self._count = generation.token_count()
        self._unsent_logprobs: list[ChatLogprob] = []
        """Log probabilities of tokens whose text has not been sent."""
        self._reasons = False
        self._reasoning_tokens = 0

    async def complete(self) -> None:
        """Makes all of the response. Raises the engine's errors."""
        async with aclosing(self.chunks(paced=False)) as chunks:
            async for _ in chunks:
                pass

    async def chunks(self, *, paced: bool = True) -> AsyncGenerator[bytes]:
        """Yields the events, and stores the response at its end. With `paced` deltas that come close together share a write."""
        batcher = self._endpoint.batcher
        with batcher.open_stream() if paced else nullcontext():
            async with aclosing(self._endpoint.deltas(self._generation)) as deltas:
                events = self.writer.begin()
                async for prompt_delta in deltas:
                    events += self._events(prompt_delta)
                    if events and paced:
                        yield events
                        await batcher.pause()
                    events = b""

    def _events(self, prompt_delta: PromptDelta) -> bytes:
        prompt, delta = prompt_delta
        self._count.add(prompt, delta, only_echo=False)
        events = b""
        for output in delta.outputs:
            pieces = self._reader.read(output)
            if (top := self._generation.top_logprobs) is not None and output.logprobs is not None:
                self._unsent_logprobs += self._logprobs.chat(output.token_ids, output.logprobs, top).content
            for piece in pieces:
                events += self.writer.piece(piece, self._unsent_logprobs)
                self._unsent_logprobs = []
            self._reasoning_tokens += self._count_reasoning(pieces, output)
            if output.finish_reason is not None:
                events += self._finish(output.finish_reason)
        return events

    def _count_reasoning(self, pieces: Sequence[Piece], output: OutputDelta) -> int:
        """Returns how many of a delta's tokens are reasoning; where it has other parts as well, those that its text has."""
        began = self._reasons
        self._reasons = isinstance(pieces[-1], Reasoning) if pieces else began
        thoughts = [piece.text for piece in pieces if isinstance(piece, Reasoning)]
        if len(thoughts) == len(pieces):
            return len(output.token_ids) if self._reasons else 0
        tokenizer = self._endpoint.engine.tokenizer
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in thoughts)

    def _finish(self, reason: FinishReason) -> bytes:
        response, own, encode = self.writer.response, input_items(self._body), msgspec.json.encode
        events = self.writer.end_item(reason)
        items = encode([*self._earlier, *own, *response["output"]])
        response["store"] &= self._endpoint.responses.takes(len(items))
        events += self.writer.finish(reason, self._usage())
        if response["store"]:
            self._endpoint.responses.put(response["id"], StoredResponse(self._owner, encode(response), items, encode(own)))
        return events

    def _usage(self) -> dict[str, Any]:
        count = self._count
        return {
            "input_tokens": count.prompt,
            "input_tokens_details": {"cached_tokens": count.cached, "cache_write_tokens": 0},
            "output_tokens": count.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": count.prompt + count.completion,
        }


def _response(generation: Generation, body: ResponsesRequest) -> dict[str, Any]:
    """Returns the response before its first item."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    summary = body.reasoning.summary if body.reasoning is not None else None
    form = body.text.format if body.text is not None else None
    params = generation.params
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": generation.created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": generation.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_described(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": getattr(params, "top_p", 1.0),
        "presence_penalty": getattr(params, "presence_penalty", 0.0),
        "frequency_penalty": getattr(params, "frequency_penalty", 0.0),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _described(tool: Any) -> Any:
    """Returns a tool with all fields that clients expect of a function."""
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    return {"description": None, "parameters": None, "strict": None, **tool} if is_function else tool
