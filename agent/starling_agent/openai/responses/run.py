"""The making of one response, from the deltas of its generation."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any

import msgspec

from starling_agent.openai.answer_parts import AnswerReader
from starling_agent.openai.endpoint import Caller, Endpoint
from starling_agent.openai.generation import Generation, PromptDelta, with_start
from starling_agent.openai.logprobs import LogprobWriter
from starling_agent.openai.protocol.answers import ChatLogprob
from starling_agent.openai.responses.conversion import input_items, own_tools
from starling_agent.openai.responses.ids import new_response_id
from starling_agent.openai.responses.protocol import ResponsesRequest
from starling_agent.openai.responses.store import CONTINUABLE, StoredResponse
from starling_agent.openai.responses.writer import ResponseWriter


class ResponseRun:
    """The making of one response."""

    def __init__(
        self, endpoint: Endpoint, generation: Generation, body: ResponsesRequest, caller: Caller, earlier: list[Any]
    ) -> None:
        self.writer = ResponseWriter(_response(endpoint, generation, body), own_tools(body))
        self._endpoint = endpoint
        self._generation = generation
        self._body = body
        self.owner = caller.owner
        self._earlier = earlier
        self._reader = AnswerReader(generation.reading)
        self._logprobs = LogprobWriter(endpoint.tokenizer, generation.tokens_as_ids)
        self._count = generation.token_count()
        self._unsent_logprobs: list[ChatLogprob] = []
        """Log probabilities of tokens whose text has not been sent."""

    async def complete(self) -> None:
        """Makes all of the response. Raises the engine's errors."""
        async with aclosing(self.chunks(paced=False)) as chunks:
            async for _ in chunks:
                pass

    async def chunks(self, *, paced: bool = True) -> AsyncGenerator[bytes]:
        """Yields the events, the first ones once the engine has taken the request, and stores the response before the last one.

        One in the background begins with its first token, and others store it. With `paced` deltas that come close together share
        a write.
        """
        batcher, begun = self._endpoint.batcher, False
        with batcher.open_stream() if paced else nullcontext():
            async with aclosing(with_start(self._endpoint.deltas(self._generation))) as deltas:
                async for prompt_delta in deltas:
                    if prompt_delta is None and self._body.background:
                        continue
                    events = b"" if begun else self.writer.begin()
                    begun = True
                    events += b"" if prompt_delta is None else self._events(prompt_delta)
                    if events:
                        yield events
                    if self.writer.has_ended:
                        yield await self._last_event()  # the text does not wait for the disk
                    elif events and paced:
                        await batcher.pause()

    def cancel(self) -> bytes:
        """Ends the response as cancelled, with the usage of what was made of it; returns the last events."""
        if self._count.completion and not self.writer.has_ended:
            self.writer.response["usage"] = self._usage()
        return self.writer.cancel()

    def stored(self, events: bytes | None = None) -> StoredResponse:
        """Returns what is stored of the response as it is now, with `events` if they fit.

        One in the background has to be stored: its conversation is left out if it has grown too large.
        """
        response, own, encode = self.writer.snapshot(), input_items(self._body), msgspec.json.encode
        ended_well = response["status"] in CONTINUABLE
        stored = StoredResponse(
            owner=self.owner,
            status=response["status"],
            response=encode(response),
            items=encode([*self._earlier, *own, *response["output"]]) if ended_well else b"",
            own_items=encode(own),
            background=bool(self._body.background),
        )
        takes = self._endpoint.responses.takes
        if stored.background and not takes(stored.size):
            stored = replace(stored, items=b"")
        with_events = replace(stored, events=events)
        return with_events if takes(with_events.size) else stored

    @property
    def output_tokens(self) -> int:
        """Tokens that have been made so far, whatever events show of them."""
        return self._count.completion

    @property
    def size(self) -> int:
        """Bytes that are stored of the response before its first item, with those of the conversation that it will go on."""
        stored = self.stored()
        return stored.size + len(msgspec.json.encode(self._earlier)) + len(stored.own_items)

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
            if output.finish_reason is not None:
                events += self.writer.end(output.finish_reason, self._usage())
        return events

    async def _last_event(self) -> bytes:
        response, responses = self.writer.response, self._endpoint.responses
        if response["store"] and not self._body.background:
            stored = self.stored()
            response["store"] = responses.takes(stored.size) and await responses.try_to_put(response["id"], stored)
        return self.writer.last_event()

    def _usage(self) -> dict[str, Any]:
        count = self._count
        return {
            "input_tokens": count.prompt,
            "input_tokens_details": {"cached_tokens": count.cached, "cache_write_tokens": 0},
            "output_tokens": count.completion,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": count.prompt + count.completion,
        }


def _response(endpoint: Endpoint, generation: Generation, body: ResponsesRequest) -> dict[str, Any]:
    """Returns the response before its first item.

    Routers read the first fields, up to `background`, and the last one, `usage`: clients write those between.
    """
    effort = body.reasoning.effort if body.reasoning is not None else None
    summary = body.reasoning.summary if body.reasoning is not None else None
    form = body.text.format if body.text is not None else None
    params = generation.params
    return {
        "id": new_response_id(endpoint.settings.pod),
        "object": "response",
        "created_at": generation.created,
        "completed_at": None,
        "status": "in_progress",
        "background": bool(body.background),
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
        "user": body.user,
        "metadata": body.metadata or {},
        "usage": None,
    }


def _described(tool: Any) -> Any:
    """Returns a tool with all fields that clients expect of a function."""
    is_function = isinstance(tool, dict) and tool.get("type") == "function"
    return {"description": None, "parameters": None, "strict": None, **tool} if is_function else tool
