"""Turns the forms that requests want into grammars, in another process, where a hostile one costs its own request alone."""

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import msgspec

from starling_engine.config import VocabularyConfig
from starling_engine.errors import InvalidRequest
from starling_engine.ipc.limited_child import ProcessLimits
from starling_engine.ipc.limited_process import JobWords, LimitedProcess
from starling_engine.params import StructuredOutputsParams
from starling_engine.request import ReasoningLimit
from starling_engine.structured_output.forms import FIELD, field_of
from starling_engine.structured_output.special_tokens import NO_MARKS, ReasoningMarks
from starling_engine.structured_output.vocabulary import NO_VOCABULARY

GRAMMAR_LIMITS = ProcessLimits(seconds=0.5, answer_seconds=10.0, memory_bytes=256 << 20)
"""Limits of one grammar. Usual ones take milliseconds."""
MAX_CACHED_BYTES = 16 << 20
"""Memory of the forms and grammars that are kept."""


class GrammarCompiler:
    """Makes grammars, for one event loop. Its process starts with the first one, and reads the vocabulary then."""

    def __init__(
        self,
        vocabulary: VocabularyConfig | None,
        added_tokens: Mapping[str, int],
        marks: ReasoningMarks | None,
        limits: ProcessLimits = GRAMMAR_LIMITS,
        *,
        max_waiting: Callable[[], int],
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        """`added_tokens` are the tokenizer's, by text; `marks` those of reasoning. Without a vocabulary every form is refused."""
        self._marks = marks
        self._ends = frozenset(vocabulary.eos_token_ids if vocabulary else ())
        self._cache = _GrammarCache(max_cached_bytes)
        self._under_way: dict[str, asyncio.Task[str]] = {}
        self._process: LimitedProcess | None = None
        if vocabulary is not None:
            settings = {"vocabulary": asdict(vocabulary), "added_tokens": dict(added_tokens), "marks": marks}
            words = JobWords("grammar", "grammars", "made")
            module = "starling_engine.frontend.grammar_child"
            self._process = LimitedProcess(module, settings, limits, words, max_waiting=max_waiting)

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def cached_bytes(self) -> int:
        return self._cache.bytes

    def has_opened_reasoning(self, prompt: Sequence[int]) -> bool:
        """Returns whether the last turn of a prompt has begun to reason."""
        return self._marks is not None and self._marks.have_opened(prompt, self._ends)

    def reasoning_limit(self, prompt: Sequence[int], tokens: int) -> ReasoningLimit:
        """Returns the limit of reasoning behind a prompt. Raises InvalidRequest where nothing marks reasoning."""
        if self._marks is None or self._process is None:
            raise InvalidRequest(NO_MARKS, "thinking_token_budget")
        marks = self._marks
        return ReasoningLimit(marks.opens, marks.ends, tokens, self.has_opened_reasoning(prompt), marks.then)

    async def compile(self, wanted: StructuredOutputsParams, *, reasoning_open: bool) -> str:
        """Returns the library's grammar for a form whose types are right; `reasoning_open` where the prompt has begun to reason.

        Raises InvalidRequest for what is not possible, or takes more than the limits, QueueFull or RequestFailed.
        """
        field = field_of(wanted)
        try:
            form = json.dumps(msgspec.structs.asdict(wanted))
        except (TypeError, ValueError) as error:  # a value that JSON does not have, or an integer of thousands of digits
            raise InvalidRequest(str(error), field) from None
        job = {"wanted": form, "reasoning_open": reasoning_open and wanted.reasoning}
        key = f"{job['reasoning_open']:d}{form}"
        if (known := self._cache.get(key)) is not None:
            return known
        if key not in self._under_way:
            made = self._under_way[key] = asyncio.create_task(self._compile(key, job, field))
            made.add_done_callback(_retrieve)
        # Others may wait for the same grammar when a client has gone.
        return await asyncio.shield(self._under_way[key])

    def close(self) -> None:
        """Ends the process. Grammars that are being made end with an error."""
        if self._process is not None:
            self._process.close()

    async def _compile(self, key: str, job: dict[str, object], field: str) -> str:
        try:
            if self._process is None:
                raise InvalidRequest(NO_VOCABULARY, FIELD)
            grammar = str(await self._process.answer(job, field))
        finally:
            del self._under_way[key]
        self._cache.put(key, grammar)
        return grammar


def _retrieve(made: asyncio.Task[str]) -> None:
    """Takes a task's error, which asyncio logs with a traceback where nobody waits for it any more."""
    if not made.cancelled():
        made.exception()


class _GrammarCache:
    """The grammars that were asked for last, within a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._grammars: OrderedDict[str, str] = OrderedDict()
        self.bytes = 0

    def get(self, key: str) -> str | None:
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
        return grammar

    def put(self, key: str, grammar: str) -> None:
        self._grammars[key] = grammar
        self.bytes += _bytes(key, grammar)
        while self.bytes > self._max_bytes:
            self.bytes -= _bytes(*self._grammars.popitem(last=False))


def _bytes(key: str, grammar: str) -> int:
    return sys.getsizeof(key) + sys.getsizeof(grammar)
