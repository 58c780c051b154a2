"""Gives requests their constraints. Grammars are built beside the steps of others."""

import logging
import time
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.ipc.priority import lower_priority
from starling_engine.request_state import Gate, RequestState
from starling_engine.structured_output.output_constraint import OutputConstraint
from starling_engine.structured_output.reasoning_budget import ReasoningBudget
from starling_engine.structured_output.templates import MatcherTemplates

logger = logging.getLogger("starling.scheduler")

BUILD_SECONDS = 10.0
"""Longest time in which no grammar is done while some are awaited. A frontend has built each already, within half a second.

To take an output again costs no more: its budget is as long.
"""


class GrammarBuilds:
    """Keeps a request behind `Gate.GRAMMAR` until its grammar is built and behind the output that the request has already.

    One thread builds, and takes outputs, one after the other. It calls `wake` when one is done. A new request whose grammar is
    known, or under way, waits for no other.
    """

    def __init__(self, vocabulary: VocabularyConfig | None, wake: Callable[[], None] = lambda: None) -> None:
        self._templates = MatcherTemplates(vocabulary)
        self._words = 0 if vocabulary is None else -(-vocabulary.size // 32)
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars", initializer=lower_priority)
        self._builds: dict[RequestState, Future[LLMatcher]] = {}
        self._under_way: dict[str, Future[LLMatcher]] = {}
        self._replays: dict[RequestState, Future[None]] = {}
        """Requests that have their constraints, whose outputs these do not have yet."""
        self._last_done = 0.0
        """Time, on the monotonic clock, when a grammar was done, or when the first one was awaited."""

    @property
    def requests(self) -> Set[RequestState]:
        """Requests that wait for their grammars."""
        return self._builds.keys() | self._replays.keys()

    def start(self, request: RequestState) -> None:
        """Begins with the grammar of an arriving request, if it has one."""
        if not request.record.grammar:
            budget = _budget(request)
            request.constraint = None if budget is None else OutputConstraint(self._words, None, budget)
            return
        request.gates.add(Gate.GRAMMAR)
        if not self.requests:
            self._last_done = time.monotonic()
        self._builds[request] = self._template(request.record.grammar)

    def _template(self, grammar: str) -> "Future[LLMatcher]":
        known = self._templates.find(grammar)
        if known is not None:
            done: Future[LLMatcher] = Future()
            done.set_result(known)
            return done
        future = self._under_way.get(grammar)
        if future is None:
            future = self._under_way[grammar] = self._thread.submit(self._templates.build, grammar)
            future.add_done_callback(lambda _: self._wake())
        return future

    def finish(self, request: RequestState) -> None:
        """Forgets a request that ends, and its grammar if nobody else waits for that."""
        if (replay := self._replays.pop(request, None)) is not None:
            replay.cancel()
        future = self._builds.pop(request, None)
        if future is not None and future not in self._builds.values():
            future.cancel()
            self._under_way.pop(request.record.grammar, None)

    def take_ready(self) -> list[tuple[RequestState, str | None]]:
        """Opens the gates of requests whose grammars are built, or will not be; with why not."""
        if not self.requests:
            return []
        now, futures = time.monotonic(), (self._builds, self._replays)
        if any(future.done() for kind in futures for future in kind.values()):
            self._last_done = now
        is_late = now - self._last_done > BUILD_SECONDS
        errors: dict[RequestState, str | None] = {}
        for request, replay in [*self._replays.items()]:
            if replay.done() or is_late:
                self.finish(request)
                errors[request] = _fault(request, replay) or (None if request.constraint is None else request.constraint.error)
        for request, build in [*self._builds.items()]:
            if build.done() or is_late:
                self.finish(request)
                errors[request] = _fault(request, build) or self._constrain(request, build.result())
        ready = errors.keys() - self._replays.keys()
        for request in ready:
            request.gates.discard(Gate.GRAMMAR)
        return [(request, error) for request, error in errors.items() if request in ready]

    def _constrain(self, request: RequestState, template: LLMatcher) -> str | None:
        """Gives a request its matcher, and has the thread take what output there is; returns why there is none."""
        self._templates.add(request.record.grammar, template)
        ends, drafts = request.stop_ids - request.eos_ids, _may_end(request, self._templates.eos_ids)
        matcher = self._templates.copy(template, ends, drafts=drafts)
        request.constraint = OutputConstraint(self._words, matcher, _budget(request))
        if matcher.error is None and (output := request.tokens[request.num_prompt :]):
            future = self._replays[request] = self._thread.submit(matcher.replay, output)
            future.add_done_callback(lambda _: self._wake())
        return matcher.error


def _fault(request: RequestState, future: "Future[LLMatcher] | Future[None]") -> str | None:
    """Returns what became of a request's grammar if it is not done. Whatever fails costs this request alone."""
    if not future.done() or future.cancelled():
        return f"no grammar was built within {BUILD_SECONDS:g} s"
    if (error := future.exception()) is not None and not isinstance(error, ModelError):
        logger.error("the grammar of %s could not be built", request.record.id, exc_info=error)
    return None if error is None else str(error)


def _budget(request: RequestState) -> ReasoningBudget | None:
    limit = request.record.reasoning_limit
    return None if limit is None else ReasoningBudget(limit, request.tokens[request.num_prompt :])


def _may_end(request: RequestState, eos_ids: frozenset[int]) -> bool:
    """Returns whether a token that ends the output is possible from the beginning. To ignore such tokens does not forbid them."""
    params = request.record.params
    forbidden = eos_ids.intersection(params.banned_token_ids or ())
    if params.allowed_token_ids is not None:
        forbidden |= eos_ids.difference(params.allowed_token_ids)
    return not params.min_tokens and (not eos_ids or forbidden != eos_ids)
