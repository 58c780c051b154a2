"""Names of the prompts that wait, made some at a time: no stream stands still while a long prompt is hashed."""

from collections.abc import Iterable

from starling_engine.request_state import Gate, RequestState

NAMED_TOKENS = 16_384
"""That are hashed between two plans, at most: a few milliseconds."""


class PromptHashing:
    """A request waits behind `Gate.NAMES` until what it could find of its prompt has names; `NAMED_TOKENS` are shared by all."""

    def __init__(self) -> None:
        self._left = NAMED_TOKENS
        self._unnamed = 0

    def begin(self, request: RequestState) -> bool:
        """Whether an arriving request is named at once."""
        self._name(request)
        if request.holding.chain.covers(len(request.tokens)):
            return True
        request.gates.add(Gate.NAMES)
        self._unnamed += 1
        return False

    def go_on(self, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Names more of those that wait, in their order; returns those that are named now."""
        self._left = NAMED_TOKENS
        named = []
        for request in waiting if self._unnamed else ():
            if Gate.NAMES in request.gates:
                self._name(request)
                if request.holding.chain.covers(len(request.tokens)):
                    self.end(request)
                    named.append(request)
                if not self._left:
                    break
        return named

    def end(self, request: RequestState) -> None:
        """It is named, or wants no names any more."""
        if Gate.NAMES in request.gates:
            request.gates.discard(Gate.NAMES)
            self._unnamed -= 1

    def _name(self, request: RequestState) -> None:
        chain, length = request.holding.chain, len(request.tokens)
        count = min(length - chain.length, self._left)
        chain.extend(request.tokens, chain.length + count)
        self._left -= count
