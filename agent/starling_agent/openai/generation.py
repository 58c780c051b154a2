"""The generation of one HTTP request: a request to the engine for each prompt, with their deltas merged."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from starling_engine import BeamSearchParams, SamplingParams
from starling_engine.outputs import DraftCount, StreamDelta

from starling_agent.openai.field_names import OwnName, errors_named, own_name
from starling_agent.openai.output_format import OutputReading
from starling_agent.openai.stream_record import StreamRecord

PromptDelta = tuple[int, StreamDelta]
TAKEN_SECONDS = 0.5
"""An engine core refuses a request within 0.2 s; one that is still open by then has been taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A checked request: prompts, parameters, and the form of the answer.

    prefixes        text that each prompt's outputs begin with: the echoed prompt, or nothing
    top_logprobs    candidates listed for each output token; None: no log probabilities
    reading         how outputs are split into content, reasoning and calls; None: all of an output is content
    prediction      token ids that the answer is expected to be
    only_echo       the prompt is only scored; the engine generates one token for it, which is dropped
    renamed         the request's names of fields, by the engine's, for errors that end it
    record          what its stream can be resumed from, on another server or here; None: it cannot
    """

    answer_id: str
    created: int
    model: str
    prompts: list[list[int]]
    params: SamplingParams | BeamSearchParams
    prefixes: list[str]
    priority: int = 0
    cache_salt: str | None = None
    top_logprobs: int | None = None
    only_echo: bool = False
    tokens_as_ids: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    prediction: list[int] | None = None
    reading: OutputReading | None = None
    record: StreamRecord | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)

    def with_names(self, names: Sequence[OwnName]) -> "Generation":
        """Returns it for a route that has other names of fields than its chat; `names` are as `fields_named` takes them."""
        return replace(self, renamed={known: own_name(name, names) or name for known, name in self.renamed.items()})

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def token_count(self) -> "TokenCount":
        """Returns the count before the first token."""
        return TokenCount(self.prompt_tokens, drafts=None if self.prediction is None else DraftCount())

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass(slots=True)
class TokenCount:
    """Tokens of a generation up to now."""

    prompt: int
    completion: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)
    drafts: DraftCount | None = None
    """Drafts of a request with a prediction, which has one prompt."""

    @property
    def cached(self) -> int:
        return sum(self.cached_by_prompt.values())

    def add(self, prompt: int, delta: StreamDelta, only_echo: bool) -> None:
        self.cached_by_prompt[prompt] = max(delta.num_cached_tokens, self.cached_by_prompt.get(prompt, 0))
        if self.drafts is not None:
            self.drafts = delta.drafts
        if not only_echo:
            self.completion += sum(len(output.token_ids) for output in delta.outputs)


async def merged(streams: Sequence[AsyncGenerator[StreamDelta]], names: Mapping[str, str]) -> AsyncGenerator[PromptDelta]:
    """Yields the deltas of all streams with their prompt's number, as they come. The first error ends all streams.

    `names` has the request's own names of fields that an error names, by the engine's.
    """
    with errors_named(names):
        if len(streams) == 1:
            async with aclosing(streams[0]) as only:
                async for delta in only:
                    yield 0, delta
        else:
            async with aclosing(_side_by_side(streams)) as deltas:
                async for numbered in deltas:
                    yield numbered


async def _side_by_side(streams: Sequence[AsyncGenerator[StreamDelta]]) -> AsyncGenerator[PromptDelta]:
    # Bounded: for a slow reader the engine's streams merge their deltas, and this queue does not grow.
    queue: asyncio.Queue[PromptDelta | Exception | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_feed(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_start(deltas: AsyncGenerator[PromptDelta]) -> AsyncGenerator[PromptDelta | None]:
    """Yields the deltas, and before the first one None if that takes long: the engine has taken the request by then."""
    async with aclosing(deltas):
        first = asyncio.ensure_future(anext(deltas))
        try:
            done, _ = await asyncio.wait((first,), timeout=TAKEN_SECONDS)
            if not done:
                yield None
            yield await first
        finally:
            first.cancel()
            await asyncio.wait((first,))  # a generator that runs cannot be closed
        async for delta in deltas:
            yield delta


async def _feed(prompt: int, stream: AsyncGenerator[StreamDelta], queue: "asyncio.Queue[PromptDelta | Exception | None]") -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put((prompt, delta))
    except Exception as error:  # noqa: BLE001 - the reader of the queue raises it
        await queue.put(error)
    else:
        await queue.put(None)
