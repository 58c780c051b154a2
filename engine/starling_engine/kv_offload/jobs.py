"""Orders to move chunks that have not been answered, and the requests that wait for them."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from starling_engine.kv.pool import BlockPool
from starling_engine.kv_offload.orders import ChunkSlot, TransferDone, TransferKind, TransferOrder
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import Chunk
from starling_engine.request_state import Gate, RequestState

BATCH = 16
"""Chunks of one order at most, for all orders but lookups, and loads into one request's blocks."""


@dataclass(slots=True)
class TransferJob:
    """One order until its answer. `blocks` are pinned on the device meanwhile, as `chunks` are in their slots."""

    order: TransferOrder
    began: float
    chunks: list[Chunk]
    blocks: list[int]
    waiting: list[tuple[RequestState, int]] = field(default_factory=list)
    """Requests that are parked until it ends, with their run at that time."""
    outcome: dict[Chunk, bool] = field(default_factory=dict)
    """True for each chunk that was moved, or found; empty until the job has ended."""

    def park(self, request: RequestState, gate: Gate) -> None:
        """Closes a gate of the request until all jobs that it is parked for have ended."""
        self.waiting.append((request, request.run))
        request.awaited.add(self.order.job)
        request.gates.add(gate)

    def let_go(self) -> None:
        """Opens the gates of all requests that have waited ever since they were parked, and wait for nothing else."""
        for request, run in self.waiting:
            if request.run == run:
                request.awaited.discard(self.order.job)
                if not request.awaited:
                    request.gates -= {Gate.KV_PROMOTION, Gate.KV_LOAD}
        self.waiting = []


class TransferJobs:
    """Makes orders, and holds those to be sent and those under way."""

    def __init__(self, primary: PrimaryIndex, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._primary = primary
        self._pool = pool
        self._jobs: dict[int, TransferJob] = {}
        self._orders: list[TransferOrder] = []
        self._number = 0

    def order(self, kind: TransferKind, chunks: list[ChunkSlot], after: int = -1) -> TransferJob:
        """Orders a transfer of chunks, whose slots and blocks the caller has pinned, once step `after` has run."""
        self._number += 1
        order = TransferOrder(self._number, kind, chunks, after)
        names, blocks = [(chunk.group, chunk.name) for chunk in chunks], [block for chunk in chunks for block in chunk.blocks]
        self._orders.append(order)
        job = self._jobs[order.job] = TransferJob(order, self.clock(), names, blocks)
        return job

    def end(self, done: TransferDone) -> TransferJob:
        """Returns the job with its outcome, and unpins what was pinned for it."""
        job = self._jobs.pop(done.job)
        job.outcome = dict(zip(job.chunks, done.done, strict=True))
        for block in reversed(job.blocks):  # a prefix is to lose its end first
            self._pool.release(block)
        match job.order.kind:
            case "store" | "promote":
                self._primary.settle(job.outcome)
            case "load" | "write_back":
                self._primary.unpin(job.outcome)
        return job

    def take_orders(self) -> list[TransferOrder]:
        """Returns the orders that have not been sent."""
        orders, self._orders = self._orders, []
        return orders

    def older_than(self, seconds: float) -> list[TransferJob]:
        end = self.clock() - seconds
        return [job for job in self._jobs.values() if job.began < end]

    def of(self, kind: TransferKind) -> list[TransferJob]:
        return [job for job in self._jobs.values() if job.order.kind == kind]

    def moving(self, kind: TransferKind, chunks: Iterable[Chunk]) -> list[TransferJob]:
        """Jobs of a kind that move any of these chunks."""
        wanted = set(chunks)
        return [job for job in self.of(kind) if not wanted.isdisjoint(job.chunks)]

    def __iter__(self) -> Iterator[TransferJob]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)
