"""What is on its way between the device, the CPU tier and the tiers outside, and who waits for it."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from starling_engine.kv_offload.orders import Order
from starling_engine.kv_offload.primary import Chunk
from starling_engine.request_state import Gate, RequestState


@dataclass(slots=True)
class TransferJob:
    """One order that has not been answered. `blocks` are pinned on the device till then, as `chunks` are in their slots."""

    order: Order
    chunks: list[Chunk]
    blocks: list[int] = field(default_factory=list)
    waiting: list[tuple[RequestState, int]] = field(default_factory=list)
    """Requests that are parked till it ends, with their run at that time."""
    began: float = 0.0

    def park(self, request: RequestState, gate: Gate) -> None:
        """Closes a gate of the request until all that it is parked for has ended."""
        self.waiting.append((request, request.run))
        request.awaited.add(self.order.job)
        request.gates.add(gate)

    @property
    def parked(self) -> list[RequestState]:
        """Those that have waited ever since, in the order in which they came."""
        return [request for request, run in self.waiting if request.run == run]

    def let_go(self) -> None:
        """Nobody waits for it any more."""
        for request in self.parked:
            request.awaited.discard(self.order.job)
            if not request.awaited:
                request.gates -= {Gate.KV_FETCH, Gate.KV_LOAD}
        self.waiting = []


class TransferJobs:
    """Numbers orders, and keeps those that are to be sent and those that are on their way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[int, TransferJob] = {}
        self._orders: list[Order] = []
        self._number = 0

    def number(self) -> int:
        """For the next order."""
        self._number += 1
        return self._number

    def add(self, job: TransferJob) -> TransferJob:
        job.began = self._clock()
        self._jobs[job.order.job] = job
        self._orders.append(job.order)
        return job

    def end(self, number: int) -> TransferJob:
        return self._jobs.pop(number)

    def take_orders(self) -> list[Order]:
        """Those that have not been sent."""
        orders, self._orders = self._orders, []
        return orders

    def now(self) -> float:
        """Seconds, as ages are counted."""
        return self._clock()

    def older_than(self, seconds: float) -> list[TransferJob]:
        end = self._clock() - seconds
        return [job for job in self._jobs.values() if job.began < end]

    def age(self, job: TransferJob) -> float:
        """Seconds since it was ordered."""
        return self._clock() - job.began

    def of(self, kind: type[Order]) -> list[TransferJob]:
        return [job for job in self._jobs.values() if isinstance(job.order, kind)]

    def bringing(self, kind: type[Order], chunks: Iterable[Chunk]) -> list[TransferJob]:
        """Those of a kind that bring any of these chunks."""
        wanted = set(chunks)
        return [job for job in self.of(kind) if not wanted.isdisjoint(job.chunks)]

    def __iter__(self) -> Iterator[TransferJob]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
