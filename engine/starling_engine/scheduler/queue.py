"""The waiting requests, in the order in which they may start."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from starling_engine.config import Policy
from starling_engine.scheduler.state import RequestState


class WaitingQueue(Protocol):
    """Iteration goes from first to last; only the request that it stands at may be removed meanwhile, which ends it."""

    def add(self, request: RequestState) -> None: ...

    def put_back(self, request: RequestState) -> None:
        """A preempted request: before all that arrived later."""
        ...

    def remove(self, request: RequestState) -> None: ...

    def __iter__(self) -> Iterator[RequestState]: ...

    def __len__(self) -> int: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._items: deque[RequestState] = deque()

    def add(self, request: RequestState) -> None:
        self._items.append(request)

    def put_back(self, request: RequestState) -> None:
        self._items.appendleft(request)

    def remove(self, request: RequestState) -> None:
        self._items.remove(request)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class PriorityQueue:
    """Lower priority number first, then by arrival."""

    def __init__(self) -> None:
        self._items: list[RequestState] = []

    def add(self, request: RequestState) -> None:
        insort(self._items, request, key=lambda r: r.order)

    put_back = add

    def remove(self, request: RequestState) -> None:
        self._items.remove(request)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def make_queue(policy: Policy) -> WaitingQueue:
    return FcfsQueue() if policy == "fcfs" else PriorityQueue()
