"""Where cached chunks are besides the device, and what is to be moved: asked, never waited for.

A chunk of confirmed tokens is copied to a slot of the CPU tier (`saves`): at once where there are tiers outside, to be written
there (`keeps`), else when the device runs out of blocks that nobody would miss. A request whose chunks lie outside is parked while
they come to slots (`fetches`), and again while they come to the device (`loads`); others run meanwhile. Whatever fails or comes
late is computed as if it had not been there.
"""

from starling_engine.config import Preempt, TiersConfig
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.costs import Costs
from starling_engine.kv_offload.demotions import Demotions
from starling_engine.kv_offload.jobs import TransferJobs
from starling_engine.kv_offload.kv_event_mirror import KVEventMirror
from starling_engine.kv_offload.loads import Loads
from starling_engine.kv_offload.orders import (
    LoadChunks,
    LookUpChunks,
    Order,
    PromoteChunks,
    StoreChunks,
    TransferDone,
    WriteBackChunks,
)
from starling_engine.kv_offload.pin_quota import PinQuota
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.promotions import Promotions
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.kv_offload.write_back import WriteBack
from starling_engine.request_state import RequestState

HUNG_SECONDS = 30.0
"""After so long, no answer of the tiers outside is expected any moment."""


class OffloadManager:
    """Of one scheduler, which asks its parts. `slots` is the size of the CPU tier in chunks, `chunk_bytes` what one has on all
    ranks together.
    """

    def __init__(self, kv: KVManager, config: TiersConfig, slots: int, chunk_bytes: int, preempt: Preempt) -> None:
        told = KVEventMirror(kv.log) if kv.log is not None else None
        chunks, host, jobs = ChunkMap(kv), PrimaryIndex(slots, config.cpu_policy, told), TransferJobs()
        claims = PinQuota(host)
        self._kv = kv
        self._host = host
        self._jobs = jobs
        self._claims = claims
        self.costs = Costs(preempt)
        self.counts = OffloadStats(config, host, chunk_bytes)
        self._keeps = WriteBack(host, jobs, self.costs, self.counts) if config.far else None
        self.fetches = Promotions(chunks, host, jobs, claims, self.costs, self.counts, far=config.far)
        self.loads = Loads(kv, chunks, host, jobs, self.costs)
        self.saves = Demotions(kv, chunks, host, jobs, self.costs, self._keeps)

    @property
    def moving(self) -> bool:
        """Whether answers are to come, or something is to be written that a crash would lose."""
        return len(self._jobs) > 0 or self.saves.urgent or self._keeps_more

    @property
    def answers_soon(self) -> bool:
        """Whether it is worth looking for answers all the time: not for those of a tier outside that hangs."""
        hung = len(self._jobs.older_than(HUNG_SECONDS))
        return len(self._jobs) > hung or self.saves.urgent or (not hung and self._keeps_more)

    @property
    def writing(self) -> bool:
        """Whether something is on its way to the tiers outside, or to be, that is not held up by one that hangs."""
        hung = self._jobs.older_than(HUNG_SECONDS)
        under_way = [job for job in (*self._jobs.of(StoreChunks), *self._jobs.of(WriteBackChunks)) if job not in hung]
        return self._keeps is not None and (bool(under_way) or self.saves.urgent or self._keeps.waiting)

    @property
    def _keeps_more(self) -> bool:
        return self._keeps is not None and self._keeps.waiting

    @property
    def uses_device(self) -> bool:
        """Whether blocks of the device are read or written, or are to be."""
        return any(job.blocks for job in self._jobs) or self.saves.urgent

    @property
    def freeing(self) -> bool:
        """Whether blocks become free as soon as they are copied."""
        refs = self._kv.pool.refs
        return any(refs[block] == 1 for job in self._jobs for block in job.blocks)

    def begin_step(self, running: int, *, idle: bool) -> None:
        """Before a step with `running` requests is made: who has waited too long goes on, and the next chunks are copied, written.
        `idle`: there is no request.
        """
        self.fetches.open_late()
        self.saves.save(running)
        if self._keeps is not None:
            self._keeps.go_on(idle=idle)

    def end_step(self, step: int, tokens: int, seconds: float) -> None:
        """The results of a step are known, which computed so many tokens."""
        self.saves.confirmed_step = step
        self.costs.computed(tokens, seconds)

    def take_orders(self) -> list[Order]:
        """Those that have not been sent."""
        return self._jobs.take_orders()

    def take(self, done: TransferDone) -> list[RequestState]:
        """An order has been carried out, or not; returns the requests that cannot have what they were promised."""
        job = self._jobs.end(done.job)
        for block in reversed(job.blocks):  # a prefix is to lose its end first
            self._kv.pool.release(block)
        failed: list[RequestState] = []
        match job.order:
            case LookUpChunks():
                self.fetches.found(job, done.done)
            case PromoteChunks():
                self.fetches.fetched(job, done.done)
            case LoadChunks():
                failed = self.loads.loaded(job, done.done, done.seconds)
            case StoreChunks():
                self.saves.stored(job, done.done, done.seconds)
            case WriteBackChunks():
                assert self._keeps is not None, "nobody else orders it"
                self._keeps.kept(job, done.done, done.taken)
        self.counts.answered(job.order, done)
        job.let_go()
        self._claims.look_again()
        return failed

    def clear(self) -> None:
        """Forgets what the CPU tier has."""
        self._claims.clear()
        self._host.clear()
        self.saves.clear()
        if self._keeps is not None:
            self._keeps.clear()
        self.counts.look()

    def pinned_blocks(self) -> list[list[int]]:
        """Of each job."""
        return [job.blocks for job in self._jobs]

    def check_integrity(self, waiting: set[str]) -> None:
        """Asserts that slots, jobs and claims agree, and that these are of `waiting` requests."""
        self._host.check_integrity()
        moved = sum(len(job.chunks) for job in self._jobs if not isinstance(job.order, LookUpChunks))
        assert self._host.num_pins == moved + self._claims.num_pins
        assert self._claims.requests <= waiting
