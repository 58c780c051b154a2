"""The engine for scripts: `LLM("model").generate(prompts)`. Names and order of arguments are vLLM's.

It has more than 500 lines since it is one class, as vLLM's is, whose methods and their arguments take most of them.
"""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from tqdm import tqdm

from starling_engine.args import EngineArgs
from starling_engine.errors import ConfigError, InvalidRequest, PromptTooLong
from starling_engine.frontend.async_engine import AsyncEngine
from starling_engine.frontend.beam import BeamSearchOutput, BeamSearchSequence
from starling_engine.frontend.beam_requests import hides_last
from starling_engine.frontend.control_tokens import ChatPrompt
from starling_engine.frontend.cross_encoder import pair_scorer
from starling_engine.frontend.gathering import gather_or_cancel
from starling_engine.frontend.loading_bar import LoadingBar
from starling_engine.frontend.loop_thread import LoopThread
from starling_engine.frontend.pairs import (
    ComparedTask,
    PairPrompt,
    PairScorer,
    Side,
    check_compared,
    check_judged,
    check_sides,
    similarities,
)
from starling_engine.frontend.pooled_texts import PooledTexts, role_of, truncation_to
from starling_engine.frontend.pooling import activated_rows, check_adapter
from starling_engine.frontend.prompt_encoder import PromptEncoder, PromptForm
from starling_engine.frontend.prompts import ParsedPrompt, Prompt, one_per_prompt, parse_conversations, parse_prompts
from starling_engine.frontend.shown_tools import Message
from starling_engine.frontend.tokenizer import Tokenizer
from starling_engine.frontend.vllm_arguments import instead_of
from starling_engine.model_config.classifier import LabelActivation, activated
from starling_engine.model_config.multi_vector import ROLES, TextRole
from starling_engine.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    PooledNumbers,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from starling_engine.params import BeamSearchParams, PoolingParams, PoolingTask, SamplingParams

T = TypeVar("T")
Pooled = EmbeddingRequestOutput | PoolingRequestOutput


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that has been checked."""

    text: str | None
    ids: list[int]
    params: SamplingParams
    priority: int


class LLM:
    """Runs a model in a process of its own until `shutdown`, the end of a `with` block, or the end of the program.

    Its methods wait for their results, and may be called from several threads. Every request of a batch is checked before the
    first one runs: after InvalidRequest or PromptTooLong nothing runs.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        """`engine_args` are the fields of EngineArgs. Raises ConfigError or ModelError, naming what is wrong.

        Nobody reads a batch's tokens as they come, so steps have no target duration unless `step_target_ms` sets one.
        """
        known = {field.name for field in fields(EngineArgs)}
        for name in engine_args:
            if name not in known:
                advice = instead_of(name) or f"there are {', '.join(sorted(known))}"
                raise ConfigError(f"there is no such argument; {advice}", name)
        args = EngineArgs(model=model, **{"step_target_ms": 0, **engine_args})
        self._thread = LoopThread("starling-llm")
        bar = LoadingBar() if args.show_progress else None
        try:
            self.engine = self._thread.run(AsyncEngine.start(args, bar))
        except BaseException:
            self._thread.stop()
            raise
        finally:
            if bar is not None:
                bar.close()
        self.shutdown: Callable[[], None] = weakref.finalize(self, _close, self._thread, self.engine)
        """Ends the engine; done at the latest when the program ends. A second call does nothing."""

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that the model's authors recommend in generation_config.json."""
        defaults: dict[str, Any] = dict(self.engine.model_config.generation_defaults)
        for name in ("top_k", "max_tokens"):
            if name in defaults:
                defaults[name] = int(defaults[name])
        return SamplingParams(**defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Completes one prompt or many, with parameters for all or for each; results are in the prompts' order."""
        jobs = self._jobs(parse_prompts(prompts), sampling_params, priority)
        return self._run_all([partial(self._complete, job) for job in jobs], _width(jobs), self._longest(jobs), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Returns the next message of one conversation or many."""
        tokenizer = self.get_tokenizer()
        chats = [
            tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template=chat_template,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in parse_conversations(messages)
        ]
        # Templates write the special tokens themselves.
        prompts = [ParsedPrompt(chat.text, tokenizer.encode(chat, add_special_tokens=False)) for chat in chats]
        jobs = self._jobs(prompts, sampling_params, 0)
        return self._run_all([partial(self._complete, job) for job in jobs], _width(jobs), self._longest(jobs), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        task: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns one vector for each prompt: fp32, of the model's hidden size or of the parameters' `dimensions`.

        Texts are read as the checkpoint's authors mean it: behind the checkpoint's prompt of that name, or its default prompt,
        and through its chat template if its config says so. Token ids are taken as they are. `truncate_prompt_tokens` keeps the
        first tokens of a longer prompt; -1 keeps as many as the model takes. `task` names one of the checkpoint's adapters
        (Jina 3), and its prompt, where `prompt_name` names none.
        """
        parsed = parse_prompts(prompts)
        each = one_per_prompt(pooling_params or PoolingParams(), len(parsed), "pooling_params", PoolingParams)
        if any(one.task != "embed" for one in each):
            raise InvalidRequest("must have the task embed; LLM.encode does the others", "pooling_params")
        if task is not None:
            check_adapter(task, self.engine.model_config, "task")
            each = [msgspec.structs.replace(one, adapter=task) for one in each]
        checked = self._thread.run(self._pooled(parsed, each, prompt_name, truncate_prompt_tokens))
        return self._embed(checked, each, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        pooling_task: PoolingTask | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns what `pooling_task` makes of each prompt, as `outputs.data`; by default the parameters' task.

        These are the vectors of `embed`, the probabilities of `classify`, and those of `reward` ("token_classify"). A vector of
        each token ("token_embed") comes in an array [T, size], a sparse one ("sparse_embed") as a SparseVector. Without
        parameters the task is "embed", or that of a model which makes no vector of a text. Raises InvalidRequest for any other
        task, and where labels are asked for with an argument of vectors.
        """
        if pooling_task not in (None, *get_args(PoolingTask)):
            possible = f"possible: {', '.join(get_args(PoolingTask))}; scores are those of LLM.score"
            raise InvalidRequest(f"{possible}, got {pooling_task!r}", "pooling_task")
        if pooling_task in ("classify", "token_classify"):
            for name, given in (("pooling_params", pooling_params), ("prompt_name", prompt_name)):
                if given is not None:
                    raise InvalidRequest("is for vectors; labels have none", name)
            if pooling_task == "token_classify":
                return self.reward(prompts, use_tqdm, truncate_prompt_tokens=truncate_prompt_tokens)
            labelled = self.classify(prompts, use_tqdm, truncate_prompt_tokens=truncate_prompt_tokens)
            return [_pooling_output(one, one.outputs.probs) for one in labelled]
        parsed = parse_prompts(prompts)
        each = one_per_prompt(pooling_params or PoolingParams(), len(parsed), "pooling_params", PoolingParams)
        task = pooling_task or (None if pooling_params else self.engine.model_config.pooler.task)
        if task is not None:
            each = [msgspec.structs.replace(one, task=task) for one in each]
        if any(one.task in ("classify", "token_classify") for one in each):
            raise InvalidRequest("labels are asked for by pooling_task", "pooling_params")
        checked = self._thread.run(self._pooled(parsed, each, prompt_name, truncate_prompt_tokens))
        return self._interacting(checked, each, role_of(prompt_name), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probability of each label for each prompt, by the model's head; with `use_activation` False its logits.

        Texts are read as they are, and cut as by `embed`. Raises InvalidRequest for a model without such a head.
        """
        found = self._embed(*self._read_plain(prompts, PoolingParams(task="classify"), truncate_prompt_tokens), use_tqdm)
        activation = self._label_activation(use_activation)
        return [
            ClassificationRequestOutput(
                one.request_id,
                one.prompt_token_ids,
                ClassificationOutput(activated(activation, one.outputs.embedding)),
                num_cached_tokens=one.num_cached_tokens,
            )
            for one in found
        ]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns the probability of each label for each token, as `outputs.data` [T, labels]; with `use_activation` False logits.

        The name is vLLM's, for models whose head rates each token. See `classify`.
        """
        found = self._encode(*self._read_plain(prompts, PoolingParams(task="token_classify"), truncate_prompt_tokens), use_tqdm)
        activation = self._label_activation(use_activation)
        return [_pooling_output(one, activated_rows(activation, np.asarray(one.outputs.data))) for one in found]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        instruction: str | None = None,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_task: ComparedTask | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns the score of each document with its query, or with the one query of all, in the documents' order.

        A reranker's score is the probability of "yes" in [0, 1], or with `use_activation` False the difference of the logits; that
        of a model with a head for one label is what its authors make of it, or with `use_activation` False its logit. The score
        of any other model is the cosine in [-1, 1] of the vectors that `embed` has. Where each token has a vector, it is the sum
        of the best cosines of the query's tokens, of BGE-M3 their mean; of sparse vectors it is the product. `pooling_task` has
        other vectors of the model compared than its own kind. A reranker's prompt is cut at its document's end. Raises
        InvalidRequest or PromptTooLong, naming the argument.
        """
        first, second = _side("queries", queries), _side("documents", documents)
        check_sides(first, second)
        if pooling_task not in (None, *get_args(ComparedTask)):
            raise InvalidRequest(f"possible: {', '.join(get_args(ComparedTask))}, got {pooling_task!r}", "pooling_task")
        if self._scorer is None:
            check_compared(instruction, use_activation)
            task = pooling_task or self.engine.model_config.pooler.task
            if task == "token_embed":
                return self._compare_tokens(first, second, truncate_prompt_tokens, use_tqdm)
            params = PoolingParams(task=task, normalize=None if task == "sparse_embed" else True)
            return self._compare(first, second, params, truncate_prompt_tokens, use_tqdm)
        check_judged(pooling_task, "pooling_task")
        prompts = self._thread.run(self._pairs(self._scorer, first, second, instruction, truncate_prompt_tokens))
        found = self._embed([prompt.ids for prompt in prompts], [prompt.params for prompt in prompts], use_tqdm)
        scores = self._scorer.scores([one.outputs.embedding for one in found], use_activation)
        return [_scored(score, one) for score, one in zip(scores, found, strict=True)]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Returns the `beam_width` best continuations of each prompt."""
        parsed = parse_prompts(prompts)
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"must be BeamSearchParams, got {params!r}", "params")
        checked = self._check(parsed, [params] * len(parsed))
        longest = self.engine.config.scheduler.max_model_len
        for ids in checked:
            if len(ids) + params.max_tokens > longest:
                counts = f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}"
                raise PromptTooLong(f"{counts}, but at most {longest} are possible in all", "prompt")
        calls = [partial(self._search, ids, params) for ids in checked]
        return self._run_all(calls, params.n, max(map(len, checked), default=1) + params.max_tokens, use_tqdm)

    def reset_prefix_cache(self) -> None:
        """Drops cached prompts that no request uses."""
        self._thread.run(self.engine.reset_prefix_cache())

    def sleep(self, level: int = 1, mode: str | None = None) -> None:
        """Gives the memory of weights and KV cache back until `wake_up`. See `AsyncEngine.sleep`."""
        self._thread.run(self.engine.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restores "weights", "kv_cache" or both. See `AsyncEngine.wake_up`."""
        self._thread.run(self.engine.wake_up(tags))

    # ---- vectors and scores ----

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.get_tokenizer(), self.engine.config.scheduler.max_model_len)

    @cached_property
    def _texts(self) -> PooledTexts:
        return PooledTexts(self._encoder, self._render, self.engine.model_config.pooler)

    @cached_property
    def _scorer(self) -> PairScorer | None:
        return pair_scorer(self._encoder, self._render, self.engine.model_config)

    async def _render(self, **job: Any) -> ChatPrompt:
        """Renders here: a script trusts its checkpoint, and nobody waits behind it."""
        return self.get_tokenizer().renderer.render(**job)

    def _read_plain(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, truncate: int | None
    ) -> tuple[list[list[int]], list[PoolingParams]]:
        """Returns token ids and parameters of prompts that a head labels: texts are read as they are."""
        parsed = parse_prompts(prompts)
        each = [params] * len(parsed)
        self.engine.validate([], params)
        forms = [self._form(True, "", truncate)] * len(parsed)
        return self._thread.run(self._token_ids(parsed, each, forms, self._encoder.text)), each

    def _label_activation(self, use_activation: bool | None) -> LabelActivation:
        classifier = self.engine.model_config.classifier
        assert classifier is not None, "checked with the parameters"
        return "identity" if use_activation is False else classifier.label_activation

    def _form(self, special: bool, prefix: str, truncate: int | None) -> PromptForm:
        least = self.get_tokenizer().num_around(special) + 1
        truncation = truncation_to(truncate, None, least, self.engine.cores.longest_request)
        return PromptForm(special, prefix, truncation, room=0)

    async def _pooled(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[PoolingParams], prompt_name: str | None, truncate: int | None
    ) -> list[list[int]]:
        """Returns the token ids of prompts that become vectors. Raises InvalidRequest if the engine would refuse one."""
        special, texts = self._texts.special_tokens, self._texts
        forms = {each: self._form(special, texts.prompt(prompt_name, each), truncate) for each in {one.adapter for one in params}}
        if prompt_name is not None and any(prompt.ids is not None for prompt in prompts):
            raise InvalidRequest("goes before texts alone; token ids are taken as they are", "prompt_name")
        return await self._token_ids(prompts, params, [forms[one.adapter] for one in params], texts.reader(role_of(prompt_name)))

    async def _token_ids(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[PoolingParams],
        forms: Sequence[PromptForm],
        read: Callable[[str, str, PromptForm], Awaitable[list[int]]],
    ) -> list[list[int]]:
        """Returns those of each prompt, of which `read` reads the texts. Raises InvalidRequest if the engine would refuse one."""
        checked = []
        for index, (prompt, prompt_params, form) in enumerate(zip(prompts, params, forms, strict=True)):
            with _noting(index, len(prompts)):
                if prompt.ids is None:
                    assert prompt.text is not None
                    ids = await read(prompt.text, "prompt", form)
                else:
                    ids = form.truncation.cut(prompt.ids) if form.truncation else prompt.ids
                self.engine.validate([ids], prompt_params)
                checked.append(ids)
        return checked

    async def _pairs(
        self, scorer: PairScorer, first: Side, second: Side, instruction: str | None, truncate: int | None
    ) -> list[PairPrompt]:
        truncation = self._form(False, "", truncate).truncation
        pairs = zip(first.of(len(second.texts)), second.texts, strict=True)
        prompts = []
        for index, (query, document) in enumerate(pairs):
            with _noting(index, len(second.texts)):
                prompt = await scorer.prompt(query, document, instruction, truncation, f"{second.field}[{index}]")
                self.engine.validate([prompt.ids], prompt.params)
                prompts.append(prompt)
        return prompts

    def _compare(
        self, first: Side, second: Side, params: PoolingParams, truncate: int | None, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        """Scores by cosines, or by products of sparse vectors. A query that is for all documents is computed once."""
        count = len(first.texts)
        texts = [ParsedPrompt(text) for text in (*first.texts, *second.texts)]
        prompts = self._thread.run(self._pooled(texts, [params] * len(texts), None, truncate))
        found = self._encode(prompts, [params] * len(prompts), use_tqdm)
        queries, documents = found[:count], found[count:]
        scores = similarities([one.outputs.data for one in queries], [one.outputs.data for one in documents])
        each = queries if count == len(documents) else queries * len(documents)
        return [_scored(*row) for row in zip(scores, documents, each, strict=True)]

    def _compare_tokens(self, first: Side, second: Side, truncate: int | None, use_tqdm: bool) -> list[ScoringRequestOutput]:
        """Scores by the vectors of tokens. A query that is for all documents is computed once."""
        params = self._texts.late.params
        found = []
        for role, side in zip(ROLES, (first, second), strict=True):
            texts = [ParsedPrompt(text) for text in side.texts]
            name = role if role in self._texts.names else None
            prompts = self._thread.run(self._pooled(texts, [params] * len(texts), name, truncate))
            found.append(self._interacting(prompts, [params] * len(texts), role, use_tqdm))
        queries, documents = ([np.asarray(one.outputs.data) for one in outputs] for outputs in found)
        scores = self._texts.late.scores(queries, documents)
        each = found[0] if len(queries) == len(documents) else found[0] * len(documents)
        return [_scored(*row) for row in zip(scores, found[1], each, strict=True)]

    def _interacting(
        self, prompts: list[list[int]], params: Sequence[PoolingParams], role: TextRole, use_tqdm: bool
    ) -> list[PoolingRequestOutput]:
        """Returns what `_encode` does, of texts of a role: where each token has a vector, some have none."""
        late = self._texts.late
        asked = [late.prompt(ids, one, role) for ids, one in zip(prompts, params, strict=True)]
        found = self._encode([ids for ids, _ in asked], [one for _, one in asked], use_tqdm)
        for output, one in zip(found, params, strict=True):
            if one.task == "token_embed":
                output.outputs.data = late.vectors(output.prompt_token_ids, np.asarray(output.outputs.data), role)
        return found

    def _embed(self, prompts: list[list[int]], params: Sequence[PoolingParams], use_tqdm: bool) -> list[EmbeddingRequestOutput]:
        calls = [partial(self.engine.embed, ids, each) for ids, each in zip(prompts, params, strict=True)]
        return self._run_all(calls, 1, max(map(len, prompts), default=1), use_tqdm)

    def _encode(self, prompts: list[list[int]], params: Sequence[PoolingParams], use_tqdm: bool) -> list[PoolingRequestOutput]:
        calls = [partial(self.engine.encode, ids, each) for ids, each in zip(prompts, params, strict=True)]
        return self._run_all(calls, 1, max(map(len, prompts), default=1), use_tqdm)

    # ---- one request ----

    def _jobs(
        self,
        prompts: Sequence[ParsedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[_Job]:
        each = one_per_prompt(params or self.get_default_sampling_params(), len(prompts), "sampling_params", SamplingParams)
        priorities = one_per_prompt(priority, len(prompts), "priority", int)
        checked = self._check(prompts, each)
        self._thread.run(self._check_forms(checked, each))
        rows = zip(prompts, checked, each, priorities, strict=True)
        return [_Job(prompt.text, ids, job_params, job_priority) for prompt, ids, job_params, job_priority in rows]

    def _check(
        self, prompts: Sequence[ParsedPrompt], params: Sequence[SamplingParams | PoolingParams | BeamSearchParams]
    ) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises InvalidRequest if the engine would refuse one."""
        checked = []
        for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            with _noting(index, len(prompts)):
                ids = self._ids(prompt)
                self.engine.validate([ids], prompt_params)
                checked.append(ids)
        return checked

    async def _check_forms(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        for index, (ids, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            with _noting(index, len(prompts)):
                await self.engine.check_structured_outputs([ids], prompt_params)

    def _ids(self, prompt: ParsedPrompt) -> list[int]:
        if prompt.ids is not None:
            return prompt.ids
        assert prompt.text is not None
        return self.get_tokenizer().encode(prompt.text)

    async def _complete(self, job: _Job) -> RequestOutput:
        output = await self.engine.complete(job.ids, job.params, priority=job.priority)
        output.prompt = job.text
        return output

    async def _search(self, ids: list[int], params: BeamSearchParams) -> BeamSearchOutput:
        found = await self.engine.beam_search(ids, params)
        return BeamSearchOutput([self._sequence(ids, output, params) for output in found.outputs])

    def _sequence(self, ids: list[int], output: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        assert output.cumulative_logprob is not None
        ended = output.finish_reason == "stop"
        tokens = [*ids, *output.token_ids]
        text = self.get_tokenizer().decode(tokens[:-1] if hides_last(ended, params) else tokens, params.skip_special_tokens)
        return BeamSearchSequence(tokens, output.cumulative_logprob, text, "stop" if ended else "length", output.logprobs)

    # ---- many requests ----

    def _longest(self, jobs: Sequence[_Job]) -> int:
        """Returns the tokens, output included, of the longest sequence that the jobs may produce."""
        limit = self.engine.config.scheduler.max_model_len
        return max((min(limit, len(job.ids) + (job.params.max_tokens or limit)) for job in jobs), default=1)

    def _run_all(self, calls: Sequence[Callable[[], Coroutine[Any, Any, T]]], width: int, longest: int, use_tqdm: bool) -> list[T]:
        """Returns results in the order of `calls`, each of which runs up to `width` sequences of at most `longest` tokens.

        The first error ends the rest.
        """
        most = self.engine.config.scheduler
        at_once = max(1, min(most.max_num_waiting // width, most.max_num_waiting_tokens // (width * longest)))
        with tqdm(total=len(calls), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._thread.run(_gather(calls, at_once, lambda: bar.update()))


@contextmanager
def _noting(index: int, count: int) -> Iterator[None]:
    """Says of a refusal which prompt it is about."""
    try:
        yield
    except InvalidRequest as error:
        error.add_note(f"(prompt {index} of {count}, counted from 0)")
        raise


async def _gather(calls: Sequence[Callable[[], Coroutine[Any, Any, T]]], at_once: int, on_done: Callable[[], object]) -> list[T]:
    # The engine refuses more requests than may wait.
    gate = asyncio.Semaphore(at_once)

    async def run(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with gate:
            result = await call()
        on_done()
        return result

    return await gather_or_cancel(run(call) for call in calls)


def _side(field: str, texts: str | Sequence[str]) -> Side:
    if isinstance(texts, str):
        return Side(field, [texts])
    if not isinstance(texts, Iterable) or isinstance(texts, Mapping):
        raise InvalidRequest(f"must be a text or several, got {texts!r}", field)
    listed = list(texts)
    for at, text in enumerate(listed):
        if not isinstance(text, str):
            raise InvalidRequest(f"must be a text, got {text!r}", f"{field}[{at}]")
    return Side(field, listed)


def _pooling_output(one: ClassificationRequestOutput | PoolingRequestOutput, data: PooledNumbers) -> PoolingRequestOutput:
    return PoolingRequestOutput(one.request_id, one.prompt_token_ids, PoolingOutput(data), num_cached_tokens=one.num_cached_tokens)


def _scored(score: float, document: Pooled, query: Pooled | None = None) -> ScoringRequestOutput:
    ids = [*query.prompt_token_ids, *document.prompt_token_ids] if query else document.prompt_token_ids
    cached = document.num_cached_tokens + (query.num_cached_tokens if query else 0)
    return ScoringRequestOutput(document.request_id, ids, ScoringOutput(score), num_cached_tokens=cached)


def _width(jobs: Sequence[_Job]) -> int:
    return max((job.params.n for job in jobs), default=1)


def _close(thread: LoopThread, engine: AsyncEngine) -> None:
    if thread.is_current():  # the garbage collector may run in this thread, which would wait for itself
        threading.Thread(target=_close, args=(thread, engine)).start()
        return
    thread.run(engine.shutdown())
    thread.stop()
