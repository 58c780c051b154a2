"""The OffloadManager of a primary tier (host memory) and, below it, secondary tiers (files, a store over the network).

    device  --- Demotions: store --->  primary tier  --- WriteBack: write --->  secondary tiers
    device  <-- Loads: load ---------  primary tier  <-- Promotions: promote -  secondary tiers

Chunks of confirmed tokens are stored at once where there are secondary tiers, to be written back there. Without any they are stored
when the device runs out of blocks that nobody would miss. A request whose chunks lie in a secondary tier is parked while they are
promoted, and again while they are loaded; others run meanwhile. Whatever fails or comes late is computed as if it were not there.
"""

from collections.abc import Mapping, Sequence, Set

from starling_engine.config import Preempt, TiersConfig
from starling_engine.delta import TierStats
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.base import OffloadManager
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.demotions import Demotions
from starling_engine.kv_offload.jobs import TransferJobs
from starling_engine.kv_offload.loads import Loads
from starling_engine.kv_offload.orders import (
    LoadChunks,
    LookUpChunks,
    Order,
    PromoteChunks,
    StoreChunks,
    TierStatus,
    TransferDone,
    WriteBackChunks,
)
from starling_engine.kv_offload.pin_quota import PinQuota
from starling_engine.kv_offload.policies import LookupPolicy, SwapPolicy, TransferCosts, WriteBackBudget
from starling_engine.kv_offload.primary import KVEventMirror, PrimaryIndex
from starling_engine.kv_offload.promotions import Promotions
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.kv_offload.write_back import WriteBack
from starling_engine.request_state import RequestState

HUNG_SECONDS = 30.0
"""An order that is older is not expected to end any moment."""


class TieredOffload(OffloadManager):
    """The parts above as one OffloadManager.

    `slots` is the size of the primary tier in chunks, `chunk_bytes` the size of one on all ranks together.
    """

    def __init__(self, kv: KVManager, config: TiersConfig, slots: int, chunk_bytes: int, preempt: Preempt) -> None:
        mirror = KVEventMirror(kv.log) if kv.log is not None else None
        chunks, primary, jobs = ChunkMap(kv), PrimaryIndex(slots, config.cpu_policy, mirror), TransferJobs()
        pins = PinQuota(primary)
        self._kv = kv
        self.primary = primary
        self.jobs = jobs
        self.pins = pins
        self.costs = TransferCosts()
        self.budget = WriteBackBudget()
        self._stats = OffloadStats(config, primary, chunk_bytes)
        self.lookups = LookupPolicy(self.costs)
        self.write_back = WriteBack(primary, jobs, self.costs, self.budget, self._stats, enabled=config.has_secondary)
        self.promotions = Promotions(
            chunks, primary, jobs, pins, self.costs, self.lookups, self.budget, self._stats, enabled=config.has_secondary
        )
        self.loads = Loads(kv, chunks, primary, jobs, self.costs)
        self.demotions = Demotions(kv, chunks, primary, jobs, self.costs, SwapPolicy(preempt, self.costs), self.write_back)

    # ---- requests ----

    def on_new_request(self, request: RequestState) -> None:
        self.promotions.begin(request)

    def on_request_preempted(self, request: RequestState) -> None:
        self.promotions.postpone(request)

    def on_request_finished(self, request: RequestState) -> None:
        self.promotions.forget(request)

    def must_wait(self, request: RequestState) -> bool:
        return self.promotions.must_wait(request)

    # ---- between the device and the primary tier ----

    def lookup(self, request: RequestState, hit: int) -> int | None:
        count = self.loads.match(request, hit)
        if count and self.loads.awaits_others(request, hit, count):
            return None
        return count * CHUNK

    def count_lookup(self, request: RequestState, hit: int, length: int) -> int:
        self._stats.looked_up(*self.loads.count(request, hit, length // CHUNK))
        return len(request.tokens) - hit * self._kv.block_size

    def prepare_load(self, request: RequestState, hit: int, length: int, after: int) -> None:
        self.loads.load(request, hit, length // CHUNK, after)

    def on_blocks_cached(self, request: RequestState) -> None:
        self.demotions.note(request)

    def prepare_store(self, running: int, *, idle: bool) -> None:
        self.promotions.release_late()
        self.demotions.store_next(running)
        self.write_back.write_next(idle=idle)

    def prepare_swap(self, request: RequestState) -> bool:
        return self.demotions.swap_out(request)

    def invalidate(self, hashes: Sequence[bytes]) -> None:
        self.demotions.invalidate(hashes)

    @property
    def frees_blocks_soon(self) -> bool:
        refs = self._kv.pool.refs
        return any(refs[block] == 1 for job in self.jobs for block in job.blocks)

    # ---- orders and their outcome ----

    def on_step_finished(self, step: int, tokens: int, seconds: float) -> None:
        self.demotions.confirmed_step = step
        self.costs.computed(tokens, seconds)
        self.budget.stepped(seconds)

    def take_orders(self) -> list[Order]:
        return self.jobs.take_orders()

    def complete(self, done: TransferDone) -> list[RequestState]:
        job = self.jobs.end(done.job)
        for block in reversed(job.blocks):  # a prefix is to lose its end first
            self._kv.pool.release(block)
        failed: list[RequestState] = []
        match job.order:
            case LookUpChunks():
                self.promotions.complete_lookup(job, done.done)
            case PromoteChunks():
                self.promotions.complete_promotion(job, done.done)
            case LoadChunks():
                failed = self.loads.complete(job, done.done, done.seconds)
            case StoreChunks():
                self.demotions.complete(job, done.done, done.seconds)
            case WriteBackChunks():
                self.write_back.complete(job, done.done, done.taken)
        self._stats.completed(job.order, done)
        job.let_go()
        self.pins.retry()
        return failed

    def reset(self) -> None:
        self.pins.clear()
        self.primary.clear()
        self.demotions.clear()
        self.write_back.clear()
        self._stats.refresh()

    # ---- reports ----

    @property
    def has_pending_work(self) -> bool:
        return len(self.jobs) > 0 or self.demotions.urgent or self.write_back.waiting

    @property
    def completes_soon(self) -> bool:
        hung = len(self.jobs.older_than(HUNG_SECONDS))
        return len(self.jobs) > hung or self.demotions.urgent or (not hung and self.write_back.waiting)

    @property
    def writes_back(self) -> bool:
        hung = self.jobs.older_than(HUNG_SECONDS)
        under_way = [job for job in (*self.jobs.of(StoreChunks), *self.jobs.of(WriteBackChunks)) if job not in hung]
        return self.write_back.enabled and (bool(under_way) or self.demotions.urgent or self.write_back.waiting)

    @property
    def uses_device(self) -> bool:
        return any(job.blocks for job in self.jobs) or self.demotions.urgent

    @property
    def stats(self) -> Mapping[str, TierStats]:
        return self._stats.tiers

    def update_status(self, status: TierStatus) -> None:
        self._stats.update(status.secondary)

    def pinned_blocks(self) -> list[list[int]]:
        return [job.blocks for job in self.jobs]

    def check_integrity(self, waiting: Set[str]) -> None:
        self.primary.check_integrity()
        moved = sum(len(job.chunks) for job in self.jobs if not isinstance(job.order, LookUpChunks))
        assert self.primary.num_pins == moved + self.pins.num_pins
        assert self.pins.requests <= waiting
