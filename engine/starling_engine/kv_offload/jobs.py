"""Orders to move chunks that have not been answered, and the requests that wait for them."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from starling_engine.kv_offload.orders import Order
from starling_engine.kv_offload.primary import Chunk
from starling_engine.request_state import Gate, RequestState


@dataclass(slots=True)
class TransferJob:
    """One order until its answer. `blocks` are pinned on the device meanwhile, as `chunks` are in their slots."""

    order: Order
    chunks: list[Chunk]
    blocks: list[int] = field(default_factory=list)
    waiting: list[tuple[RequestState, int]] = field(default_factory=list)
    """Requests that are parked until it ends, with their run at that time."""
    began: float = 0.0

    def park(self, request: RequestState, gate: Gate) -> None:
        """Closes a gate of the request until all jobs that it is parked for have ended."""
        self.waiting.append((request, request.run))
        request.awaited.add(self.order.job)
        request.gates.add(gate)

    @property
    def parked(self) -> list[RequestState]:
        """Requests that have waited ever since they were parked, in the order in which they came."""
        return [request for request, run in self.waiting if request.run == run]

    def let_go(self) -> None:
        """Opens the gates of all requests that wait for nothing else."""
        for request in self.parked:
            request.awaited.discard(self.order.job)
            if not request.awaited:
                request.gates -= {Gate.KV_PROMOTION, Gate.KV_LOAD}
        self.waiting = []


class TransferJobs:
    """Numbers orders, and holds those to be sent and those under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._jobs: dict[int, TransferJob] = {}
        self._orders: list[Order] = []
        self._number = 0

    def number(self) -> int:
        """Returns the number of the next order."""
        self._number += 1
        return self._number

    def add(self, job: TransferJob) -> TransferJob:
        job.began = self.clock()
        self._jobs[job.order.job] = job
        self._orders.append(job.order)
        return job

    def end(self, number: int) -> TransferJob:
        return self._jobs.pop(number)

    def take_orders(self) -> list[Order]:
        """Returns the orders that have not been sent."""
        orders, self._orders = self._orders, []
        return orders

    def older_than(self, seconds: float) -> list[TransferJob]:
        end = self.clock() - seconds
        return [job for job in self._jobs.values() if job.began < end]

    def of(self, kind: type[Order]) -> list[TransferJob]:
        return [job for job in self._jobs.values() if isinstance(job.order, kind)]

    def moving(self, kind: type[Order], chunks: Iterable[Chunk]) -> list[TransferJob]:
        """Jobs of a kind that move any of these chunks."""
        wanted = set(chunks)
        return [job for job in self.of(kind) if not wanted.isdisjoint(job.chunks)]

    def __iter__(self) -> Iterator[TransferJob]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
