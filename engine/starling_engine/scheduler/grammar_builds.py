"""Builds the grammars of requests beside the steps of others."""

import logging
import time
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from starling_engine.config import VocabularyConfig
from starling_engine.errors import ModelError
from starling_engine.request_state import Gate, RequestState
from starling_engine.structured_output.matcher import GrammarMatcher
from starling_engine.structured_output.templates import MatcherTemplates

logger = logging.getLogger("starling.scheduler")

BUILD_SECONDS = 10.0
"""Longest wait for a grammar. A frontend has built it once already, in milliseconds; the first one waits for the tokenizer too."""


class Build(NamedTuple):
    """A matcher that is being built; `deadline` is a time of the monotonic clock."""

    future: "Future[GrammarMatcher]"
    deadline: float


class GrammarBuilds:
    """Keeps a request behind `Gate.GRAMMAR` until its grammar is built. `wake` is called, by a thread, when one is."""

    def __init__(self, vocabulary: VocabularyConfig | None, wake: Callable[[], None] = lambda: None) -> None:
        self._templates = None if vocabulary is None else MatcherTemplates(vocabulary)
        self._eos_ids = frozenset(() if vocabulary is None else vocabulary.eos_token_ids)
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._builds: dict[RequestState, Build] = {}

    @property
    def requests(self) -> Set[RequestState]:
        """Requests whose grammars are being built."""
        return self._builds.keys()

    def start(self, request: RequestState) -> None:
        """Begins with the grammar of an arriving request, if it has one."""
        if not request.record.grammar:
            return
        request.gates.add(Gate.GRAMMAR)
        future = self._thread.submit(self._build, request)
        self._builds[request] = Build(future, time.monotonic() + BUILD_SECONDS)
        future.add_done_callback(lambda _: self._wake())

    def finish(self, request: RequestState) -> None:
        """Forgets a request that ends."""
        build = self._builds.pop(request, None)
        if build is not None:
            build.future.cancel()

    def take_ready(self) -> list[tuple[RequestState, str | None]]:
        """Opens the gates of requests whose grammars are built, or will not be; with why not."""
        ready: list[tuple[RequestState, str | None]] = []
        now = time.monotonic() if self._builds else 0.0
        for request, build in tuple(self._builds.items()):
            if build.future.done() or now > build.deadline:
                ready.append((request, _apply(request, build.future)))
                self.finish(request)
                request.gates.discard(Gate.GRAMMAR)
        return ready

    def _build(self, request: RequestState) -> GrammarMatcher:
        if self._templates is None:
            raise ModelError("this engine has no vocabulary for grammars")
        output = request.tokens[request.num_prompt :]
        ends = request.stop_ids - request.eos_ids
        return self._templates.matcher(request.record.grammar, output, ends, drafts=_may_end(request, self._eos_ids))


def _may_end(request: RequestState, eos_ids: frozenset[int]) -> bool:
    """Returns whether a token that ends the output is possible from the beginning. To ignore such tokens does not forbid them."""
    params = request.record.params
    possible = eos_ids.difference(params.banned_token_ids or ())
    if params.allowed_token_ids is not None:
        possible &= set(params.allowed_token_ids)
    return not params.min_tokens and bool(possible)


def _apply(request: RequestState, future: "Future[GrammarMatcher]") -> str | None:
    """Gives a request its matcher; returns why there is none. Whatever fails costs this request alone."""
    if not future.done():
        return f"the grammar was not built within {BUILD_SECONDS:g} s"
    if (error := future.exception()) is not None:
        if not isinstance(error, ModelError):
            logger.error("the grammar of %s could not be built", request.record.id, exc_info=error)
        return str(error)
    request.constraint = matcher = future.result()
    return matcher.error
