"""Hashes waiting prompts piece by piece, so that no stream stands still while a long prompt is hashed."""

from collections.abc import Iterable

from starling_engine.request_state import Gate, RequestState

MAX_HASHED_TOKENS = 16_384
"""Most tokens that are hashed between two plans: a few milliseconds."""


class PromptHashing:
    """Keeps a request behind `Gate.HASHING` until its prompt is hashed; all requests share `MAX_HASHED_TOKENS`."""

    def __init__(self) -> None:
        self._left = MAX_HASHED_TOKENS
        self._num_unfinished = 0

    def start(self, request: RequestState) -> bool:
        """Begins with an arriving request; returns whether it is hashed at once."""
        self._hash(request)
        if request.blocks.chain.covers(len(request.tokens)):
            return True
        request.gates.add(Gate.HASHING)
        self._num_unfinished += 1
        return False

    def advance(self, waiting: Iterable[RequestState]) -> list[RequestState]:
        """Hashes more of the waiting prompts, in their order; returns the requests that are done."""
        self._left = MAX_HASHED_TOKENS
        hashed = []
        for request in waiting if self._num_unfinished else ():
            if Gate.HASHING in request.gates:
                self._hash(request)
                if request.blocks.chain.covers(len(request.tokens)):
                    self.finish(request)
                    hashed.append(request)
                if not self._left:
                    break
        return hashed

    def finish(self, request: RequestState) -> None:
        """Opens the gate: the request is hashed, or leaves the queue."""
        if Gate.HASHING in request.gates:
            request.gates.discard(Gate.HASHING)
            self._num_unfinished -= 1

    def _hash(self, request: RequestState) -> None:
        chain, length = request.blocks.chain, len(request.tokens)
        count = min(length - chain.length, self._left)
        chain.extend(request.tokens, chain.length + count)
        self._left -= count
