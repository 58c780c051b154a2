"""The waiting requests, in the order in which they may start."""

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Iterator

from starling_engine.config import SchedulingPolicy
from starling_engine.request_state import RequestState


class WaitingQueue(ABC):
    """Waiting requests. Iteration goes from first to last; removing the current request is allowed, and ends it."""

    _items: deque[RequestState] | list[RequestState]

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all requests, prompts and output: none grows while it waits."""

    def add(self, request: RequestState) -> None:
        self.num_tokens += len(request.tokens)
        self._insert(request)

    def put_back(self, request: RequestState) -> None:
        """Queues a preempted request before all that arrived later."""
        self.num_tokens += len(request.tokens)
        self._insert_again(request)

    def remove(self, request: RequestState) -> None:
        self._items.remove(request)
        self.num_tokens -= len(request.tokens)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @abstractmethod
    def _insert(self, request: RequestState) -> None: ...

    @abstractmethod
    def _insert_again(self, request: RequestState) -> None: ...


class FcfsQueue(WaitingQueue):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[RequestState] = deque()

    def _insert(self, request: RequestState) -> None:
        self._items.append(request)

    def _insert_again(self, request: RequestState) -> None:
        self._items.appendleft(request)


class PriorityQueue(WaitingQueue):
    """Lower priority number first, then by arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._items: list[RequestState] = []

    def _insert(self, request: RequestState) -> None:
        insort(self._items, request, key=lambda r: r.order)

    _insert_again = _insert


def make_queue(policy: SchedulingPolicy) -> WaitingQueue:
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
