"""The engine for a server: takes requests, gives streams."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile

import msgspec

from starling_engine.args import EngineArgs, classifier_of
from starling_engine.config import EngineConfig
from starling_engine.core.messages import Loading
from starling_engine.delta import MOVED, Delta, Stats
from starling_engine.elastic.coordinator import Coordinator, SizeChange, Stage
from starling_engine.elastic.epoch_plans import ExpertSpace
from starling_engine.errors import ConfigError, InvalidRequest, PromptTooLong, RequestFailed
from starling_engine.frontend.assembler import Assembler
from starling_engine.frontend.beam import beam_search
from starling_engine.frontend.beam_requests import BeamRequests, beam_output
from starling_engine.frontend.classifier import with_classifier
from starling_engine.frontend.cores import CoreClients
from starling_engine.frontend.following import follow_caches
from starling_engine.frontend.grammars import GrammarCompiler
from starling_engine.frontend.pooling import check_gives_tokens, check_pooling, numbers_of, resolved
from starling_engine.frontend.request_progress import RequestProgress, raise_failure
from starling_engine.frontend.resolve import read_chat_template, resolve, resolve_tokenizer
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.kv.changes import CoreChanges
from starling_engine.model_config.config import ModelConfig
from starling_engine.outputs import (
    EarlierOutput,
    EarlierRun,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    StreamDelta,
)
from starling_engine.params import BeamSearchParams, PoolingParams, SamplingParams
from starling_engine.request import EngineRequest, ReasoningLimit
from starling_engine.sleep import check_level, check_mode, check_tags
from starling_engine.structured_output.forms import field_of
from starling_engine.structured_output.special_tokens import ReasoningMarks
from starling_engine.topology.layout import NodePlacement

Prompt = str | list[int]


class AsyncEngine:
    """Sends requests to the least loaded of its engine cores (`cores`). Belongs to the event loop that made it."""

    def __init__(self, tokenizer: Tokenizer, model_config: ModelConfig, config: EngineConfig, host: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.config = config
        self.cores = CoreClients(config, host)
        added = {token.content: number for number, token in tokenizer.backend.get_added_tokens_decoder().items()}
        marks = ReasoningMarks.find(added, partial(tokenizer.encode, add_special_tokens=False))
        self.grammars = GrammarCompiler(config.vocabulary, added, marks, max_waiting=lambda: self.max_open_requests)
        self._seeds = random.Random(config.seed)

    @classmethod
    async def start(
        cls, args: EngineArgs, on_phase: Callable[[Loading], None] | None = None, node: NodePlacement | None = None
    ) -> "AsyncEngine":
        """Starts an engine core for each data parallel rank, each in a process of its own, and waits until they are ready.

        `on_phase` gets their progress. `node` is this node's part of a group of several nodes: only its cores are started, if it
        has any, and `cores.add` connects to those of other nodes.

        Raises ConfigError or ModelError.
        """
        engine = await cls._without_cores(args, node)
        ranks = range(args.data_parallel_size) if node is None else node.cores
        # While the cores load: whoever reads prompts wants to know it.
        measuring = asyncio.create_task(asyncio.to_thread(lambda: engine.tokenizer.longest_token))
        try:
            if engine.config.worker.dp_sync and node is None:
                await engine._start_first_epoch(args.data_parallel_size)
            else:
                await engine.cores.local.start(ranks, on_phase, alone=args.data_parallel_size == 1)
            await measuring
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    @classmethod
    async def _without_cores(cls, args: EngineArgs, node: NodePlacement | None = None) -> "AsyncEngine":
        """Reads configs and tokenizer. Raises ConfigError or ModelError."""
        folder, model_config, config = await asyncio.to_thread(resolve, args, node)
        template = read_chat_template(args)
        found = await asyncio.to_thread(resolve_tokenizer, args, folder)
        tokenizer = Tokenizer.load(found, model_config.pooler.markers, template)
        tokenizer.check_fits(model_config.vocab_size)
        model_config = with_classifier(model_config, classifier_of(args), tokenizer)
        return cls(tokenizer, model_config, config, node.host if node is not None else None)

    async def _start_first_epoch(self, data: int) -> None:
        """Starts the first epoch of cores that share the experts."""
        experts = ExpertSpace.of(self.model_config, self.config)
        self.cores.coordinator = Coordinator(experts, self.cores.local, self.config.progress_timeout)
        await self.cores.coordinator.resize(SizeChange(data))

    @classmethod
    async def attach(cls, args: EngineArgs, addresses: Sequence[str]) -> "AsyncEngine":
        """Connects another frontend to cores that run already. Raises EngineDead when one does not answer."""
        engine = await cls._without_cores(args)
        try:
            await engine.cores.attach(addresses)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def scale(self, data: int, on_stage: Callable[[Stage], None] | None = None) -> dict[str, float]:
        """Changes the number of engine cores while they serve; returns the seconds of each stage. `on_stage` is called at each.

        No request is lost: those of a core that leaves go on on another. Cancelled before the commit the change is undone; later
        it ends as if it had not been cancelled.

        Raises ConfigError for an impossible size, OperationRunning during another change, EpochFailed when the change failed and
        was undone, EngineDead when the group cannot go on.
        """
        if self.cores.coordinator is None or not self.config.worker.elastic:
            raise ConfigError("only an engine that was started with it can change its size", "enable_elastic_ep")
        change = SizeChange(data, on_stage)
        await self.cores.coordinator.resize(change)
        return change.seconds

    async def shutdown(self) -> None:
        """Ends the cores that this engine started; open requests end with them."""
        self.grammars.close()
        await self.cores.close()

    # ---- requests ----

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        prediction: list[int] | None = None,
        earlier: EarlierRun | None = None,
    ) -> AsyncIterator[StreamDelta]:
        """Yields what the request gains, merged when the reader is slow. Closing the iterator aborts the request.

        `prediction` has the token ids that the output is expected to be; it makes the request faster, and changes nothing else.
        `earlier` is what the same request, with the same seed, had on another engine: its gains come first, marked as replayed.
        Raises InvalidRequest, PromptTooLong or QueueFull before the first item; RequestFailed or EngineDead at any time.
        """
        with await self._submit(
            prompt, params, request_id, priority, cache_salt, prediction, earlier, cumulative=False
        ) as progress:
            while (gains := await progress.next()) is not None:
                yield gains

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        prediction: list[int] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the whole output so far, whenever the request gains something. Otherwise as `stream`."""
        with await self._submit(prompt, params, request_id, priority, cache_salt, prediction, cumulative=True) as progress:
            while await progress.next() is not None:
                yield progress.assembler.output()

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        prediction: list[int] | None = None,
    ) -> RequestOutput:
        """Returns the final output. Raises as `stream` does."""
        with await self._submit(prompt, params, request_id, priority, cache_salt, prediction, cumulative=True) as progress:
            return await progress.finish()

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Returns the best outputs, best first, at most as long as the model and the KV cache allow.

        Each step is a request for each beam; a core takes them in turn with all others. An error of one ends the search, and
        cancelling it aborts them. Raises as `stream` does, at any time.
        """
        self._check_params(params)
        ids = await self._prompt_ids(prompt, room=1)
        request_id = request_id or new_request_id()
        params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, self.cores.longest_request - len(ids)))
        complete = partial(self.complete, priority=priority, cache_salt=cache_salt)
        requests = BeamRequests(complete, request_id, texts=params.logprobs is not None)
        beams = await beam_search(ids, params, self.model_config.eos_token_ids, requests.expand)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=ids,
            outputs=[beam_output(index, beam, ids, params, self.tokenizer) for index, beam in enumerate(beams)],
            finished=True,
            num_cached_tokens=requests.num_cached_tokens,
            queue_seconds=requests.queue_seconds,
            first_token_seconds=requests.first_token_seconds,
        )

    async def embed(
        self, prompt: Prompt, params: PoolingParams, *, request_id: str | None = None, cache_salt: str | None = None
    ) -> EmbeddingRequestOutput:
        """Returns one vector for the prompt. Raises as `stream` does."""
        found = await self.encode(prompt, params, request_id=request_id, cache_salt=cache_salt)
        vector, cached = found.outputs.data, found.num_cached_tokens
        assert isinstance(vector, list), "the task gives one vector"
        return EmbeddingRequestOutput(found.request_id, found.prompt_token_ids, EmbeddingOutput(vector), num_cached_tokens=cached)

    async def encode(
        self, prompt: Prompt, params: PoolingParams, *, request_id: str | None = None, cache_salt: str | None = None
    ) -> PoolingRequestOutput:
        """Returns what the parameters' task makes of the prompt; logits, of a task with labels. Raises as `stream` does."""
        request_id = request_id or new_request_id()
        self._check_params(params)
        ids = await self._prompt_ids(prompt, room=0)
        pooling = resolved(params, self.model_config)
        request = EngineRequest(id=request_id, prompt_ids=ids, pooling=pooling, arrival=time.time(), cache_salt=cache_salt)
        delta = await self._pool(request, ids if pooling.reads_prefix_cache else [])
        raise_failure(delta)
        if delta.finish_reason == "abort":
            raise RequestFailed("the engine was put to sleep before the prompt was read")
        assert delta.pooled is not None
        cached = delta.cached_tokens or 0
        special = self.tokenizer.special_ids if self.model_config.pooler.retrieval is not None else ()
        numbers = numbers_of(delta.pooled, pooling, len(ids), left_out=special)
        return PoolingRequestOutput(request_id, ids, PoolingOutput(numbers), num_cached_tokens=cached)

    async def _pool(self, request: EngineRequest, cacheable: list[int]) -> Delta:
        """Returns the last delta of a request without output tokens, by the core that may have `cacheable`. Raises EngineDead."""
        while True:
            done: asyncio.Future[Delta] = asyncio.get_running_loop().create_future()
            client = self.cores.choose(cacheable, request.cache_salt)

            def sink(delta: Delta, done: asyncio.Future[Delta] = done) -> None:
                if not done.done():
                    done.set_result(delta)

            await client.add(request, sink)
            try:
                delta = await done
            finally:
                client.abort([request.id])
            if delta.error is not None:
                client.check()
            if delta.finish_reason != MOVED:
                return delta
            request.attempt += 1

    def validate(self, prompts: Sequence[list[int]], params: SamplingParams | PoolingParams | BeamSearchParams) -> None:
        """Raises InvalidRequest or PromptTooLong for prompts that can never run; nothing is sent."""
        self._check_params(params)
        for prompt in prompts:
            self._check_prompt(prompt, room=0 if isinstance(params, PoolingParams) else 1)

    async def check_structured_outputs(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Raises InvalidRequest for a form or a budget that cannot be enforced behind one of the prompts; nothing is sent."""
        for prompt in prompts:
            self._reasoning_limit(prompt, params)
            await self._grammar_of(prompt, params)

    def _reasoning_limit(self, prompt: list[int], params: SamplingParams) -> ReasoningLimit | None:
        budget = params.thinking_token_budget
        return None if budget is None else self.grammars.reasoning_limit(prompt, budget)

    async def _grammar_of(self, prompt: list[int], params: SamplingParams) -> str:
        """Returns the grammar of the form that a request wants, empty if it wants none. Its parameters are valid.

        Raises as `GrammarCompiler.compile` does.
        """
        if params.structured_outputs is None:
            return ""
        is_open = params.structured_outputs.reasoning and self.grammars.has_opened_reasoning(prompt)
        return await self.grammars.compile(params.structured_outputs, reasoning_open=is_open)

    def _check_params(self, params: SamplingParams | PoolingParams | BeamSearchParams) -> None:
        model = self.model_config
        if isinstance(params, PoolingParams):
            check_pooling(params, model)
        elif isinstance(params, BeamSearchParams):
            params.validate(len(model.eos_token_ids))
        else:
            params.validate(model.vocab_size, model.eos_token_ids)
        if not isinstance(params, PoolingParams):
            check_gives_tokens(model)

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        prediction: list[int] | None,
        earlier: EarlierRun | None = None,
        *,
        cumulative: bool,
    ) -> RequestProgress:
        self._check_params(params)
        ids = await self._prompt_ids(prompt, room=1)
        grammar = await self._grammar_of(ids, params)
        request_id = request_id or new_request_id()
        text = prompt if isinstance(prompt, str) else None
        assembler = Assembler(request_id, text, ids, params, self.tokenizer, cumulative=cumulative)
        progress = RequestProgress(lambda: self.cores.choose(ids, cache_salt), assembler)
        seed = self.draw_seed() if params.seed is None else params.seed
        first = EngineRequest(
            id=f"{request_id}/0",
            prompt_ids=ids,
            # A core has no use for the form.
            params=msgspec.structs.replace(params, structured_outputs=None),
            grammar=grammar,
            grammar_field=None if params.structured_outputs is None else field_of(params.structured_outputs),
            reasoning_limit=self._reasoning_limit(ids, params),
            seed=_as_int64(seed),
            priority=priority,
            cache_salt=cache_salt,
            arrival=time.time(),
            prediction_ids=self._possible_drafts(prediction or ()),
        )
        try:
            if earlier is not None:
                progress.replay(earlier)
            for index, record in enumerate(_with_forks(first)):
                if not assembler.is_finished(index):
                    await progress.add(index, record if earlier is None else _continued(record, earlier.outputs[index]))
        except BaseException:
            progress.close()
            raise
        return progress

    def _possible_drafts(self, prediction: Sequence[int]) -> list[int]:
        """Returns a prediction up to the first token that the model has no embedding of: no output has it."""
        return list(takewhile(lambda token: 0 <= token < self.model_config.vocab_size, prediction))

    def draw_seed(self) -> int:
        """Returns the seed of a request that has none."""
        return self._seeds.getrandbits(63)

    async def _prompt_ids(self, prompt: Prompt, room: int) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        self._check_prompt(prompt, room)
        return prompt

    def _check_prompt(self, ids: list[int], room: int) -> None:
        """Raises InvalidRequest or PromptTooLong. `room` tokens must fit after the prompt."""
        if not ids:
            raise InvalidRequest("the prompt must hold at least one token", "prompt")
        longest = self.cores.longest_request
        if len(ids) + room > longest:
            considered = ", the KV cache considered" if self.model_config.causal else ""
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens{considered}. However, the prompt has "
                f"{len(ids)}, of which at most {longest - room} are possible",
                "prompt",
            )
        vocab_size = self.model_config.vocab_size
        if max(ids) >= vocab_size or min(ids) < 0:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            known = 0 <= wrong < self.tokenizer.vocab_size
            what = f", the token {self.tokenizer.token_text(wrong)!r}, which the model has no embedding of" if known else ""
            raise InvalidRequest(f"token ids must be in [0, {vocab_size - 1}], got {wrong}{what}", "prompt")

    # ---- sleep ----

    async def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Gives memory back, on all cores, and waits until that is done. No request is taken before `wake_up`.

        Level 1 drops the KV cache and moves the weights to host memory, level 2 drops both. While requests run it is refused,
        unless `mode` is "wait" (they finish first) or "abort" (they end with what they have). Sleeping twice is allowed.

        Raises InvalidRequest, SleepRefused, SleepFailed when nothing has changed, or EngineDead.
        """
        await self.cores.sleep(check_level(level), check_mode(mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restores what `tags` name ("weights", "kv_cache"), or all; it serves when all is there. Waking twice is allowed.

        Raises InvalidRequest, SleepFailed when it goes on sleeping and can be woken again, or EngineDead.
        """
        await self.cores.wake_up(check_tags(tags))

    @property
    def is_sleeping(self) -> bool:
        """True when every core has given something back."""
        return self.sleep_level > 0

    @property
    def sleep_level(self) -> int:
        """The level at which every core sleeps; 0 while some core is awake."""
        return self.cores.sleep_level

    @property
    def sleeps_in_part(self) -> bool:
        """True when some core has given something back, and another has not."""
        return len({bool(client.sleep_state.asleep) for client in self.cores.serving}) > 1

    @property
    def is_awake(self) -> bool:
        """True when some core takes requests; before a sleep, while requests end, none does."""
        return any(client.sleep_state.taking for client in self.cores.serving)

    # ---- the engine itself ----

    @property
    def max_open_requests(self) -> int:
        """Sequences that may run or wait at once, on all cores that serve."""
        scheduler = self.config.scheduler
        return (scheduler.max_num_seqs + scheduler.max_num_waiting) * len(self.cores.serving)

    @property
    def stats(self) -> Stats:
        """The newest counters of this node's cores, summed."""
        return self.cores.stats

    def check_health(self) -> None:
        """Raises EngineDead when a core of this node died, stopped answering, or has work but makes no progress."""
        self.cores.check()

    async def reset_prefix_cache(self) -> None:
        await self.cores.reset_prefix_cache()

    def follow_caches(self) -> AsyncGenerator[Sequence[CoreChanges]]:
        """Returns as `following.follow_caches` does. Raises EngineDead at the first item."""
        return follow_caches(self.cores)


def _with_forks(first: EngineRequest) -> Iterator[EngineRequest]:
    """Yields the `n` sequences of a request: the first, and forks that share its prompt. Only the first has prompt logprobs."""
    yield first
    fork_params = msgspec.structs.replace(first.params, prompt_logprobs=None)
    for index in range(1, first.params.n):
        request_id = f"{first.id.removesuffix('/0')}/{index}"
        yield msgspec.structs.replace(
            first, id=request_id, params=fork_params, seed=_as_int64(first.seed + index), fork_of=first.id, output_ids=[]
        )


def _continued(record: EngineRequest, output: EarlierOutput) -> EngineRequest:
    """Returns the record of a sequence that ran elsewhere. It was accepted there, as its attempt says."""
    return msgspec.structs.replace(record, output_ids=list(output.token_ids), attempt=1)


def new_request_id() -> str:
    return uuid.uuid4().hex


def _as_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
