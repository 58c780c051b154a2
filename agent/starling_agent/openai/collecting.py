"""Collects the deltas of a generation into one answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from starling_engine.outputs import FinishReason, OutputDelta, TokenLogprobs

from starling_agent.openai.answer_parts import AnswerParts, AnswerReader
from starling_agent.openai.generation import Generation, PromptDelta
from starling_agent.openai.protocol.answers import Usage, make_usage


@dataclass(slots=True)
class Choice:
    """One complete output, without the echoed prompt."""

    index: int
    prompt: int
    reader: AnswerReader
    parts: AnswerParts = field(default_factory=AnswerParts)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def ended_by(self) -> FinishReason | Literal["tool_calls"] | None:
        """The reason for the end, as answers have it."""
        return None if self.finish_reason is None else self.reader.ended_by(self.finish_reason)

    def add(self, output: OutputDelta) -> None:
        self.parts.add(self.reader.read(output))
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.finish_reason = output.finish_reason or self.finish_reason
        self.stop_reason = output.stop_reason if output.stop_reason is not None else self.stop_reason


@dataclass(slots=True)
class Collected:
    """A complete generation: all choices in order; `prompt_logprobs` by prompt."""

    choices: list[Choice]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]]
    usage: Usage


async def collect(generation: Generation, deltas: AsyncGenerator[PromptDelta]) -> Collected:
    n = generation.params.n
    choices = [Choice(index, index // n, AnswerReader(generation.reading)) for index in range(generation.num_choices)]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    count = generation.token_count()
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            count.add(prompt, delta, generation.only_echo)
            if delta.prompt_logprobs is not None:
                prompt_logprobs[prompt] = delta.prompt_logprobs
            for output in delta.outputs:
                choices[prompt * n + output.index].add(output)
    if generation.only_echo:
        choices = [Choice(c.index, c.prompt, c.reader, finish_reason="length") for c in choices]
    reasoning = sum(choice.reader.reasoning_tokens for choice in choices) if generation.reading is not None else None
    usage = make_usage(count.prompt, count.completion, count.cached, count.drafts, reasoning)
    return Collected(choices, prompt_logprobs, usage)
