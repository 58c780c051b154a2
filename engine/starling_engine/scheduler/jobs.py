"""What is on its way between the device, the CPU tier and the tiers outside."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from starling_engine.scheduler.state import RequestState
from starling_engine.tiers.host import Chunk
from starling_engine.tiers.orders import Order


@dataclass(slots=True)
class Job:
    """One order that has not been answered. `blocks` are pinned on the device till then, as `chunks` are in their slots."""

    order: Order
    chunks: list[Chunk]
    blocks: list[int] = field(default_factory=list)
    waiting: list[tuple[RequestState, int]] = field(default_factory=list)
    """Requests that are parked till it ends, with their run at that time."""
    began: float = 0.0


class Jobs:
    """Numbers orders, and keeps those that are to be sent and those that are on their way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[int, Job] = {}
        self._orders: list[Order] = []
        self._number = 0

    def number(self) -> int:
        """For the next order."""
        self._number += 1
        return self._number

    def add(self, job: Job) -> None:
        job.began = self._clock()
        self._jobs[job.order.job] = job
        self._orders.append(job.order)

    def end(self, number: int) -> Job:
        return self._jobs.pop(number)

    def take_orders(self) -> list[Order]:
        """Those that have not been sent."""
        orders, self._orders = self._orders, []
        return orders

    def now(self) -> float:
        """Seconds, as ages are counted."""
        return self._clock()

    def older_than(self, seconds: float) -> list[Job]:
        end = self._clock() - seconds
        return [job for job in self._jobs.values() if job.began < end]

    def age(self, job: Job) -> float:
        """Seconds since it was ordered."""
        return self._clock() - job.began

    def of(self, kind: type[Order]) -> list[Job]:
        return [job for job in self._jobs.values() if isinstance(job.order, kind)]

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
