"""Builds the grammars of requests beside the steps of others."""

import logging
import time
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.request_state import Gate, RequestState
from starling_engine.structured_output.templates import MatcherTemplates

logger = logging.getLogger("starling.scheduler")

BUILD_SECONDS = 10.0
"""Longest time in which no grammar is done while some are awaited. A frontend has built each already, within half a second."""


class GrammarBuilds:
    """Keeps a request behind `Gate.GRAMMAR` until its grammar is built. `wake` is called, by a thread, when one is.

    Grammars are built one after the other. Who asks for one that is known, or under way, waits for no other.
    """

    def __init__(self, vocabulary: VocabularyConfig | None, wake: Callable[[], None] = lambda: None) -> None:
        self._templates = MatcherTemplates(vocabulary)
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._builds: dict[RequestState, Future[LLMatcher]] = {}
        self._under_way: dict[str, Future[LLMatcher]] = {}
        self._last_done = 0.0
        """Time, on the monotonic clock, when a grammar was done, or when the first one was awaited."""

    @property
    def requests(self) -> Set[RequestState]:
        """Requests whose grammars are being built."""
        return self._builds.keys()

    def start(self, request: RequestState) -> None:
        """Begins with the grammar of an arriving request, if it has one."""
        if not request.record.grammar:
            return
        request.gates.add(Gate.GRAMMAR)
        if not self._builds:
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
        future = self._builds.pop(request, None)
        if future is not None and future not in self._builds.values():
            future.cancel()
            self._under_way.pop(request.record.grammar, None)

    def take_ready(self) -> list[tuple[RequestState, str | None]]:
        """Opens the gates of requests whose grammars are built, or will not be; with why not."""
        if not self._builds:
            return []
        now = time.monotonic()
        if any(future.done() for future in self._builds.values()):
            self._last_done = now
        is_late = now - self._last_done > BUILD_SECONDS
        ready = [(request, future) for request, future in self._builds.items() if future.done() or is_late]
        return [(request, self._open(request, future)) for request, future in ready]

    def _open(self, request: RequestState, future: "Future[LLMatcher]") -> str | None:
        """Gives a request its matcher; returns why there is none. Whatever fails costs this request alone."""
        self.finish(request)
        request.gates.discard(Gate.GRAMMAR)
        if not future.done() or future.cancelled():
            return f"no grammar was built within {BUILD_SECONDS:g} s"
        if (error := future.exception()) is not None:
            if not isinstance(error, ModelError):
                logger.error("the grammar of %s could not be built", request.record.id, exc_info=error)
            return str(error)
        self._templates.add(request.record.grammar, future.result())
        output, ends = request.tokens[request.num_prompt :], request.stop_ids - request.eos_ids
        drafts = _may_end(request, self._templates.eos_ids)
        request.constraint = matcher = self._templates.copy(future.result(), output, ends, drafts=drafts)
        return matcher.error


def _may_end(request: RequestState, eos_ids: frozenset[int]) -> bool:
    """Returns whether a token that ends the output is possible from the beginning. To ignore such tokens does not forbid them."""
    params = request.record.params
    forbidden = eos_ids.intersection(params.banned_token_ids or ())
    if params.allowed_token_ids is not None:
        forbidden |= eos_ids.difference(params.allowed_token_ids)
    return not params.min_tokens and (not eos_ids or forbidden != eos_ids)
