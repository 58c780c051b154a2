"""The engine as a server sees it: requests in, streams out."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

from starling_engine.args import EngineArgs
from starling_engine.config import EngineConfig
from starling_engine.core.messages import Loading
from starling_engine.delta import MOVED, Delta, Stats
from starling_engine.elastic.change import SizeChange, Stage
from starling_engine.elastic.coordinator import Coordinator
from starling_engine.elastic.expert_space import ExpertSpace
from starling_engine.errors import ConfigError, InvalidRequest, PromptTooLong, RequestFailed
from starling_engine.frontend.assembler import Assembler
from starling_engine.frontend.cores import CoreClients
from starling_engine.frontend.request_progress import RequestProgress, raise_failure
from starling_engine.frontend.resolve import resolve, resolve_tokenizer
from starling_engine.frontend.sleeping import put_to_sleep, sleep_level, wake
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.model_config.config import ModelConfig
from starling_engine.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, StreamDelta
from starling_engine.params import PoolingParams, SamplingParams
from starling_engine.request import EngineRequest
from starling_engine.sleep import check_level, check_mode, check_tags
from starling_engine.topology.node_placement import NodePlacement

Prompt = str | list[int]


class AsyncEngine:
    """Talks to one engine core or several (`cores`); the least loaded takes a request. Lives on the event loop that made it."""

    def __init__(self, tokenizer: Tokenizer, model_config: ModelConfig, config: EngineConfig, host: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.config = config
        self.cores = CoreClients(config, host)
        self._seeds = random.Random(config.seed)

    @classmethod
    async def start(
        cls, args: EngineArgs, on_phase: Callable[[Loading], None] | None = None, here: NodePlacement | None = None
    ) -> "AsyncEngine":
        """Starts an engine core for each data parallel rank, each in a process of its own, and waits until they are ready.

        `on_phase` hears what they do meanwhile. `here` is this node's part of a group of several: only its cores are started, none
        perhaps, and `cores.add` connects to those of other nodes.

        Raises ConfigError or ModelError when it cannot be.
        """
        folder, model_config, config = await asyncio.to_thread(resolve, args, here)
        tokenizer = Tokenizer.load(await asyncio.to_thread(resolve_tokenizer, args, folder))
        ranks = range(args.data_parallel_size) if here is None else here.cores
        engine = cls(tokenizer, model_config, config, here.host if here is not None else None)
        try:
            if config.worker.lockstep and here is None:
                await engine._start_together(args.data_parallel_size)
            else:
                await engine.cores.own.start(ranks, on_phase, alone=args.data_parallel_size == 1)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def _start_together(self, data: int) -> None:
        """The first epoch of cores that hold the experts among them."""
        experts = ExpertSpace.of(self.model_config, self.config)
        self.cores.coordinator = Coordinator(experts, self.cores.own, self.config.progress_timeout)
        await self.cores.coordinator.resize(SizeChange(data))

    @classmethod
    async def attach(cls, args: EngineArgs, addresses: Sequence[str]) -> "AsyncEngine":
        """Another frontend to cores that run already. Raises EngineDead when one does not answer."""
        folder, model_config, config = await asyncio.to_thread(resolve, args)
        tokenizer = Tokenizer.load(await asyncio.to_thread(resolve_tokenizer, args, folder))
        engine = cls(tokenizer, model_config, config)
        try:
            await engine.cores.attach(addresses)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def scale(self, data: int, tell: Callable[[Stage], None] | None = None) -> dict[str, float]:
        """Changes the number of engine cores while they serve; `tell` hears of each stage. Seconds that each stage took.

        No request is lost: those of a core that leaves go on on another. Raises ConfigError for a size that cannot be,
        OperationRunning while another change is under way, EpochFailed when it came to nothing and all is as it was, EngineDead
        when the group cannot go on. Cancelled before the commit it is undone, and later it ends as if it had not been.
        """
        if self.cores.coordinator is None or not self.config.worker.elastic:
            raise ConfigError("only an engine that was started with it can change its size", "enable_elastic_ep")
        change = SizeChange(data, tell)
        await self.cores.coordinator.resize(change)
        return change.seconds

    async def shutdown(self) -> None:
        """Ends the cores that this engine started; open requests end with them."""
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
    ) -> AsyncIterator[StreamDelta]:
        """Yields what the request gains, merged when the reader is slow. Closing the iterator aborts the request.

        Raises InvalidRequest, PromptTooLong or QueueFull before the first item; RequestFailed or EngineDead at any time.
        """
        run = await self._submit(prompt, params, request_id, priority, cache_salt, cumulative=False)
        item: StreamDelta | None = None
        try:
            # Not until the assembler has finished: it may do so while the reader is busy with an earlier item.
            while item is None or not item.finished:
                await run.wait()
                item = run.assembler.take()
                if item is not None:
                    yield item
        finally:
            run.close()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `stream`, but every item is the whole output so far."""
        run = await self._submit(prompt, params, request_id, priority, cache_salt, cumulative=True)
        output: RequestOutput | None = None
        try:
            while output is None or not output.finished:
                await run.wait()
                if run.assembler.take() is not None:
                    output = run.assembler.output()
                    yield output
        finally:
            run.close()

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """The final output alone."""
        run = await self._submit(prompt, params, request_id, priority, cache_salt, cumulative=True)
        try:
            while not run.assembler.finished:
                await run.wait()
            return run.assembler.output()
        finally:
            run.close()

    async def embed(
        self, prompt: Prompt, params: PoolingParams, *, request_id: str | None = None, cache_salt: str | None = None
    ) -> EmbeddingRequestOutput:
        """One vector for the prompt. Raises as `stream` does."""
        request_id = request_id or new_request_id()
        self._check_params(params)
        ids = await self._prompt_ids(prompt, room=0)
        delta = await self._pool(
            EngineRequest(id=request_id, prompt_ids=ids, pooling=params, arrival=time.time(), cache_salt=cache_salt)
        )
        raise_failure(delta)
        if delta.finish_reason == "abort":
            raise RequestFailed("the engine was put to sleep before the prompt was read")
        assert delta.pooled is not None
        return EmbeddingRequestOutput(request_id, ids, EmbeddingOutput(delta.pooled))

    async def _pool(self, request: EngineRequest) -> Delta:
        """The last word on a request that gives no tokens. Raises EngineDead."""
        while True:
            done: asyncio.Future[Delta] = asyncio.get_running_loop().create_future()
            client = self.cores.choose([])  # pooling reads no cached prefix

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

    def validate(self, prompts: Sequence[list[int]], params: SamplingParams | PoolingParams) -> None:
        """Raises InvalidRequest or PromptTooLong for what can never run; nothing is sent."""
        self._check_params(params)
        for prompt in prompts:
            self._check_prompt(prompt, room=1 if isinstance(params, SamplingParams) else 0)

    def _check_params(self, params: SamplingParams | PoolingParams) -> None:
        if isinstance(params, SamplingParams):
            params.validate(self.model_config.vocab_size, self.model_config.eos_token_ids)
        else:
            params.validate()

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        *,
        cumulative: bool,
    ) -> "RequestProgress":
        self._check_params(params)
        ids = await self._prompt_ids(prompt, room=1)
        request_id = request_id or new_request_id()
        text = prompt if isinstance(prompt, str) else None
        assembler = Assembler(request_id, text, ids, params, self.tokenizer, cumulative=cumulative)
        run = RequestProgress(lambda: self.cores.choose(ids, cache_salt), assembler)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        first = EngineRequest(
            id=f"{request_id}/0",
            prompt_ids=ids,
            params=params,
            seed=_as_int64(seed),
            priority=priority,
            cache_salt=cache_salt,
            arrival=time.time(),
        )
        try:
            for index, record in enumerate(_with_forks(first)):
                await run.add(index, record)
        except BaseException:
            run.close()
            raise
        return run

    async def _prompt_ids(self, prompt: Prompt, room: int) -> list[int]:
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        self._check_prompt(prompt, room)
        return prompt

    def _check_prompt(self, ids: list[int], room: int) -> None:
        """`room` is how many tokens must fit besides the prompt."""
        if not ids:
            raise InvalidRequest("the prompt must hold at least one token", "prompt")
        longest = self.cores.longest_request
        if len(ids) + room > longest:
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens, the KV cache considered. However, the prompt has "
                f"{len(ids)}, of which at most {longest - room} are possible",
                "prompt",
            )
        vocab_size = self.model_config.vocab_size
        if max(ids) >= vocab_size or min(ids) < 0:
            raise InvalidRequest(f"token ids must be in [0, {vocab_size - 1}]", "prompt")

    # ---- sleep ----

    async def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Gives memory back, on all cores; waits until that is done. No request is taken before `wake_up`.

        Level 1 drops the KV cache and moves the weights to host memory, level 2 drops both. While requests run it is refused,
        unless `mode` is "wait" (they finish first) or "abort" (they end with what they have). To sleep twice is to sleep.

        Raises InvalidRequest, SleepRefused, SleepFailed when all is as it was, or EngineDead.
        """
        await put_to_sleep(self.cores.connected, check_level(level), check_mode(mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes again what `tags` name ("weights", "kv_cache"), or all; it serves when all is there. To wake twice is to wake.

        Raises InvalidRequest, SleepFailed when it goes on sleeping and can be woken again, or EngineDead.
        """
        await wake(self.cores.connected, check_tags(tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether every core has given something back."""
        return self.sleep_level > 0

    @property
    def sleep_level(self) -> int:
        """The level at which every core sleeps; 0 while some core is awake."""
        return sleep_level(self.cores.serving)

    @property
    def is_awake(self) -> bool:
        """Whether some core takes requests: while requests end for a sleep that was asked for, none may."""
        return any(client.sleep_state.taking for client in self.cores.serving)

    # ---- the engine itself ----

    @property
    def places(self) -> int:
        """Sequences that may run or wait at once, on all cores that take part."""
        scheduler = self.config.scheduler
        return (scheduler.max_num_seqs + scheduler.max_num_waiting) * len(self.cores.serving)

    @property
    def stats(self) -> Stats:
        """The newest counters of all cores, summed; those of other nodes are counted there."""
        return self.cores.stats

    def check_health(self) -> None:
        """Raises EngineDead when a core died, stopped answering, or has work but makes no progress; not those of other nodes."""
        self.cores.check()

    async def reset_prefix_cache(self) -> None:
        await self.cores.reset_prefix_cache()


def _with_forks(first: EngineRequest) -> Iterator[EngineRequest]:
    """The sequences of one request: the first, and those that share its prompt. Prompt scores are wanted once."""
    yield first
    own = msgspec.structs.replace(first.params, prompt_logprobs=None)
    for index in range(1, first.params.n):
        request_id = f"{first.id.removesuffix('/0')}/{index}"
        yield msgspec.structs.replace(
            first, id=request_id, params=own, seed=_as_int64(first.seed + index), fork_of=first.id, output_ids=[]
        )


def new_request_id() -> str:
    return uuid.uuid4().hex


def _as_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
