"""The OffloadManager of a primary tier (host memory) and, below it, secondary tiers (files, a store over the network).

    device  --- DeviceTransfers: store --->  primary tier  --- WriteBack: write --->  secondary tiers
    device  <-- DeviceTransfers: load -----  primary tier  <-- Promotions: promote -  secondary tiers

Chunks of confirmed tokens are stored at once where there are secondary tiers, to be written back there. Without any they are stored
when the device runs out of blocks that nobody would miss. A request whose chunks lie in a secondary tier is parked while they are
promoted, and again while they are loaded; others run meanwhile. Whatever fails or comes late is computed as if it were not there.
"""

from collections.abc import Collection, Mapping, Sequence, Set

from starling_engine.config import PreemptionMode, TiersConfig
from starling_engine.delta import TierStats
from starling_engine.kv.events import EventLog
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.base import OffloadManager
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.device import DeviceTransfers
from starling_engine.kv_offload.jobs import TransferJobs
from starling_engine.kv_offload.orders import TierStatus, TransferDone, TransferOrder
from starling_engine.kv_offload.pin_quota import PinQuota
from starling_engine.kv_offload.policies import LookupPolicy, SwapPolicy, TransferCosts, WriteBackBudget
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.promotions import Promotions
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.kv_offload.write_back import WriteBack
from starling_engine.request_state import RequestState


class TieredOffload(OffloadManager):
    """The parts above as one OffloadManager.

    `slots` is the size of the primary tier in chunks, `chunk_bytes` the size of one on all ranks together.
    """

    def __init__(self, kv: KVManager, config: TiersConfig, slots: int, chunk_bytes: int, preempt: PreemptionMode) -> None:
        chunks = ChunkMap(kv)
        primary = PrimaryIndex(slots, config.cpu_policy, chunks.pieces)
        if kv.events.published:
            primary.publish(kv.events)
        stats, enabled = OffloadStats(config, primary, chunk_bytes), config.has_secondary
        jobs = TransferJobs(primary, kv.pool)
        self._stats = stats
        self.primary = primary
        self.jobs = jobs
        self.pins = PinQuota(primary)
        self.costs = costs = TransferCosts()
        self.budget = WriteBackBudget()
        self.lookups = LookupPolicy(costs)
        self.write_back = WriteBack(primary, jobs, costs, self.budget, stats, enabled=enabled)
        self.promotions = Promotions(chunks, primary, jobs, self.pins, costs, self.lookups, self.budget, stats, enabled=enabled)
        self.device = DeviceTransfers(kv, chunks, primary, jobs, costs, SwapPolicy(preempt, costs), self.write_back, stats)

    # ---- requests ----

    def on_new_request(self, request: RequestState) -> None:
        self.promotions.begin(request)

    def on_request_preempted(self, request: RequestState) -> None:
        self.promotions.postpone(request, [])  # only then is it known what the device still has

    def on_request_finished(self, request: RequestState) -> None:
        self.promotions.forget(request)

    def must_wait(self, request: RequestState) -> bool:
        return self.promotions.must_wait(request)

    # ---- between the device and the primary tier ----

    def lookup(self, request: RequestState, hit: int) -> int | None:
        return self.device.lookup(request, hit)

    def count_lookup(self, request: RequestState, hit: int, length: int) -> int:
        return self.device.count_lookup(request, hit, length)

    def prepare_load(self, request: RequestState, hit: int, length: int, after: int) -> None:
        self.device.load(request, hit, length, after)

    def on_blocks_cached(self, request: RequestState) -> None:
        self.device.note(request)

    def on_snapshots_cached(self, request: RequestState, lengths: Sequence[int]) -> None:
        self.device.note_snapshots(request, lengths)

    def on_request_stopped(self, request: RequestState) -> None:
        self.device.note_snapshots(request, request.blocks.state.output_names)

    def prepare_store(self, running: int, *, idle: bool) -> None:
        self.promotions.release_late()
        self.device.store_next(running)
        self.write_back.write_next(idle=idle)

    def prepare_swap(self, request: RequestState) -> bool:
        return self.device.swap_out(request)

    def invalidate(self, hashes: Sequence[bytes]) -> None:
        self.device.invalidate(hashes)

    # ---- orders and their outcome ----

    def on_step_finished(self, step: int, tokens: int, seconds: float) -> None:
        self.device.confirmed_step = step
        self.costs.computed(tokens, seconds)
        self.budget.stepped(seconds)

    def take_orders(self) -> list[TransferOrder]:
        return self.jobs.take_orders()

    def complete(self, done: TransferDone) -> list[RequestState]:
        job = self.jobs.end(done)
        failed: list[RequestState] = []
        match job.order.kind:
            case "look_up":
                self.promotions.complete_lookup(job)
            case "promote":
                self.promotions.complete_promotion(job)
            case "load":
                failed = self.device.complete_load(job, done.seconds)
            case "store":
                self.device.complete_store(job, done.seconds)
            case "write_back":
                self.write_back.complete(job, done.taken)
        self._stats.completed(job.order, done)
        job.let_go()
        self.pins.retry()
        return failed

    def reset(self) -> None:
        self.pins.clear()
        self.primary.clear()
        self.device.clear()
        self.write_back.clear()

    def publish(self, log: EventLog | None) -> Collection[tuple[int, bytes]]:
        return self.primary.publish(log)

    # ---- reports ----

    @property
    def has_pending_work(self) -> bool:
        return len(self.jobs) > 0 or self.device.urgent or self.write_back.waiting

    @property
    def uses_device(self) -> bool:
        return any(job.blocks for job in self.jobs) or self.device.urgent

    @property
    def stats(self) -> Mapping[str, TierStats]:
        return self._stats.tiers

    def update_status(self, status: TierStatus) -> None:
        self._stats.update(status.secondary)

    def pinned_blocks(self) -> list[list[int]]:
        return [job.blocks for job in self.jobs]

    def check_integrity(self, waiting: Set[str]) -> None:
        self.primary.check_integrity()
        moved = sum(len(job.chunks) for job in self.jobs if job.order.kind != "look_up")
        assert self.primary.num_pins == moved + self.pins.num_pins
        assert self.pins.requests | self.promotions.postponed.keys() <= waiting
