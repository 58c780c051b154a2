"""Where cached chunks are besides the device, and what is to be moved: asked, never waited for.

A chunk of confirmed tokens is copied to a slot of the CPU tier: at once where there are tiers outside, to be written there, else
when the device runs out of blocks that nobody would miss. A request whose chunks lie outside is parked while they come to slots,
and again while they come to the device; others run meanwhile. Whatever fails or comes late is computed as if it had not been there.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from starling_engine.config import Preempt, TiersConfig
from starling_engine.delta import TierStats
from starling_engine.kv.chunks import ChunkMap
from starling_engine.kv.manager import KVManager
from starling_engine.kv.pool import NULL_BLOCK
from starling_engine.scheduler.claims import Claims, most_kept
from starling_engine.scheduler.costs import Costs
from starling_engine.scheduler.jobs import Job, Jobs
from starling_engine.scheduler.state import Gate, RequestState
from starling_engine.tiers.far import CHUNK
from starling_engine.tiers.host import Chunk, HostIndex
from starling_engine.tiers.orders import (
    ChunkAt,
    ChunkMove,
    Done,
    FarReport,
    FetchChunks,
    FindChunks,
    KeepChunks,
    LoadChunks,
    StoreChunks,
)

STORE_BATCH = 16
"""Chunks that are copied to slots by one order; there is one such order at a time."""
KEEP_BATCH = 32
"""Chunks that are written outside by one order; there is one such order at a time."""
FETCH_SECONDS = 3.0
"""How long a request waits for what the tiers outside have."""
HUNG_SECONDS = 30.0
"""After so long, no answer of theirs is expected any moment."""
MIN_BLANK = 1 / 8
"""Share of the device's blocks that are to be free without losing anything; below it, what is cached is copied to the CPU tier."""


class Offload:
    """Of one scheduler. `slots` is the size of the CPU tier in chunks, `chunk_bytes` what one has on all ranks together."""

    def __init__(self, kv: KVManager, config: TiersConfig, slots: int, chunk_bytes: int, preempt: Preempt) -> None:
        self.stats = {"cpu": TierStats(capacity=slots * chunk_bytes)}
        """By tier; what is told of those outside comes with the answers of the ranks."""
        if config.fs_path is not None:
            self.stats["filesystem"] = TierStats(capacity=config.fs_bytes, shared=True)
        if config.store is not None:
            self.stats["store"] = TierStats(shared=True)
        self.costs = Costs(preempt)
        self._kv = kv
        self._far = config.far
        self._host = HostIndex(slots, config.cpu_policy)
        self._jobs = Jobs()
        self.take_orders = self._jobs.take_orders
        self._chunk_bytes = chunk_bytes
        self._map = ChunkMap(kv)
        self._blocks = self._map.blocks
        self._unsaved: OrderedDict[Chunk, list[bytes]] = OrderedDict()
        """Chunks of confirmed tokens that are on the device alone, with the names of their blocks."""
        self._claims = Claims(self._host)
        self.confirmed_step = -1
        """The last step of which the results are known."""
        self._headroom = 0
        """Blocks that running requests may need next."""
        self._unkept: OrderedDict[Chunk, None] = OrderedDict()
        """Chunks in slots that are to be written outside."""
        self._failed: OrderedDict[Chunk, None] = OrderedDict()
        """Chunks that could not be: they are tried again with what is stored next, by when the tiers may be back."""

    @property
    def moving(self) -> bool:
        """Whether answers are to come, or something is to be written that a crash would lose."""
        return len(self._jobs) > 0 or self._saving

    @property
    def answers_soon(self) -> bool:
        """Whether it is worth looking for answers all the time: not for those of a tier outside that hangs."""
        return len(self._jobs) > len(self._jobs.older_than(HUNG_SECONDS)) or self._saving

    @property
    def uses_device(self) -> bool:
        """Whether blocks of the device are read or written, or are to be."""
        return any(job.blocks for job in self._jobs) or self._saving

    @property
    def _saving(self) -> bool:
        return self._far and bool(self._unsaved)

    @property
    def freeing(self) -> bool:
        """Whether blocks become free as soon as they are copied."""
        refs = self._kv.pool.refs
        return any(refs[block] == 1 for job in self._jobs for block in job.blocks)

    # ---- from outside to slots ----

    def arrive(self, request: RequestState) -> bool:
        """Asks the tiers outside for what a request could use that waits; it is parked until they have answered.

        Returns False when there was nothing to ask for, as the device and the CPU tier have it all.
        """
        if not self._far or request.skips_tiers or not request.reads_prefix_cache or len(request.tokens) <= CHUNK:
            return False
        names = self._map.names(request.holding, request.tokens)
        first = len(self._kv.find_prefix(request.holding, request.tokens)[0]) // self._blocks
        asked = [(group, name) for name in names[first:] for group in self._map.groups]
        if all(map(self._host.has, asked)):
            return False
        if self._unanswered() or not self.costs.fetch_pays(len(self._map.groups)):
            return True
        self._await_coming(request, asked)
        unknown = [chunk for chunk in asked if not self._host.expects(chunk)]
        if unknown:
            order = FindChunks(self._jobs.number(), [ChunkAt(-1, *chunk) for chunk in unknown])
            self._park(request, Job(order, unknown), Gate.KV_FETCH)
        return True

    def _fetch(self, request: RequestState, found: set[Chunk]) -> None:
        """Has the longest prefix that there is brought to slots, of as much as there are."""
        names = self._map.names(request.holding, request.tokens)
        first = len(self._kv.find_prefix(request.holding, request.tokens)[0]) // self._blocks
        count = self._map.longest(names, first, lambda chunk: chunk in found or self._host.expects(chunk))
        needed = [chunk for chunk, _ in sorted(self._map.needed(names, first, count), key=lambda each: each[1])]
        self._await_coming(request, needed)
        missing = [chunk for chunk in needed if not self._host.expects(chunk)]
        if not self._claims.has_room(request.record.id, needed):
            if missing:
                self._claims.put_off(request.record.id, missing)
            return
        for chunk in filter(self._host.has, needed):
            self._host.use(chunk)
        self._claims.claim(request.record.id, needed)
        coming: list[ChunkAt] = []
        for chunk in missing:
            slot = self._host.take(chunk)
            if slot is None:
                break
            coming.append(ChunkAt(slot, *chunk))
        if coming:
            order = FetchChunks(self._jobs.number(), coming)
            self._park(request, Job(order, [(at.group, at.name) for at in coming]), Gate.KV_FETCH)

    def forget(self, request: RequestState) -> None:
        """A request that was waiting does so no more: nothing has to be kept for it."""
        self._claims.forget(request.record.id)

    def put_back(self, request: RequestState) -> None:
        """A preempted request asks when its turn comes: not before is it known what the device will have given up by then."""
        if self._far:
            self._claims.put_off(request.record.id, [])

    def pass_over(self, request: RequestState) -> bool:
        """Whether a request that could start is to wait: it asks the tiers now, or there is no room yet for what it would fetch."""
        name = request.record.id
        if request.skips_tiers or not self._claims.is_put_off(name):
            return False
        if not self._claims.take_turn(name):
            if self._claims.passed_over(name, self._jobs.now()) <= FETCH_SECONDS:
                return True
            self._claims.end_put_off(name)
            return False
        if self.arrive(request):
            self._claims.end_put_off(name)
        return bool(request.gates)

    def _await_coming(self, request: RequestState, chunks: list[Chunk]) -> None:
        wanted = set(chunks)
        for job in self._jobs.of(FetchChunks):
            if not wanted.isdisjoint(job.chunks):
                self._wait_for(request, job, Gate.KV_FETCH)

    def _park(self, request: RequestState, job: Job, gate: Gate) -> None:
        self._jobs.add(job)
        self._wait_for(request, job, gate)

    def _wait_for(self, request: RequestState, job: Job, gate: Gate) -> None:
        job.waiting.append((request, request.run))
        request.awaited.add(job.order.job)
        request.gates.add(gate)

    def _end_wait(self, job: Job) -> None:
        for request, run in job.waiting:
            request.awaited.discard(job.order.job)
            if request.run == run and not request.awaited:
                request.gates -= {Gate.KV_FETCH, Gate.KV_LOAD}
        job.waiting = []

    def _unanswered(self) -> bool:
        """Whether the tiers outside hang: nobody else is to wait for them."""
        return any(isinstance(job.order, FindChunks | FetchChunks) for job in self._jobs.older_than(FETCH_SECONDS))

    def open_late(self) -> None:
        """Lets requests go whose chunks take too long. What still comes is of use to others."""
        for job in self._jobs.older_than(FETCH_SECONDS):
            if job.waiting and isinstance(job.order, FindChunks | FetchChunks):
                self._end_wait(job)

    # ---- from slots to the device ----

    def match(self, request: RequestState, hit: int) -> int:
        """Chunks, counted from the start, that the request has on the device (`hit` blocks) and then in slots; 0 for no gain."""
        if request.skips_tiers or len(request.tokens) <= CHUNK:
            return 0
        count = self._map.longest(self._map.names(request.holding, request.tokens), hit // self._blocks, self._host.has)
        return count if count * self._blocks > hit else 0

    def count_lookup(self, request: RequestState, hit: int, count: int) -> None:
        """A request was admitted with `count` chunks, the first `hit` blocks of which the device had."""
        names, cpu = self._map.names(request.holding, request.tokens), self.stats["cpu"]
        first = hit // self._blocks
        cpu.queries_total += sum(1 for _ in self._map.needed(names, first, len(names)))
        cpu.hits_total += sum(1 for _ in self._map.needed(names, first, count))

    def parked(self, request: RequestState, hit: int, count: int) -> bool:
        """Whether others load the same now: it then waits for theirs."""
        names = self._map.names(request.holding, request.tokens)
        wanted = {chunk for chunk, _ in self._map.needed(names, hit // self._blocks, count)}
        for job in self._jobs.of(LoadChunks):
            if not wanted.isdisjoint(job.chunks):
                self._wait_for(request, job, Gate.KV_LOAD)
        return Gate.KV_LOAD in request.gates

    def load(self, request: RequestState, hit: int, count: int, after: int) -> None:
        """Fills the request's blocks from the `hit`-th on, and parks it until they are there."""
        holding, names = request.holding, self._map.names(request.holding, request.tokens)
        moves, chunks, blocks = [], [], []
        for chunk, at in self._map.needed(names, hit // self._blocks, count):
            table = holding.tables[chunk[0]][max(at * self._blocks, hit) : (at + 1) * self._blocks]
            wanted = [block for block in table if block != NULL_BLOCK]
            moves.append(ChunkMove(self._host.pin(chunk), chunk[0], self._blocks - len(wanted), wanted))
            chunks.append(chunk)
            blocks += wanted
        for block in blocks:
            self._kv.pool.share(block)
        self._park(request, Job(LoadChunks(self._jobs.number(), after, moves), chunks, blocks), Gate.KV_LOAD)

    # ---- from the device to slots and outside ----

    def confirm(self, request: RequestState) -> None:
        """Notes the chunks that have become full of confirmed tokens."""
        holding = request.holding
        while (holding.saved_chunks + 1) * self._blocks <= holding.cached_blocks:
            at = holding.saved_chunks * self._blocks
            names = holding.chain.names[at : at + self._blocks]
            for group in self._map.groups:
                self._unsaved[group, names[-1]] = names
            holding.saved_chunks += 1
        while len(self._unsaved) > self._kv.pool.num_blocks:
            self._unsaved.popitem(last=False)

    def save(self, running: int) -> None:
        """Has some chunks copied to slots, where it is time; leaves the `running` requests blocks to grow into."""
        self._headroom = running * len(self._map.groups)
        self._save()

    def _save(self) -> None:
        if not self._unsaved or self._jobs.of(StoreChunks) or not (self._far or self._under_pressure()):
            return
        batch = list(islice(self._unsaved.items(), STORE_BATCH))
        for chunk, _ in batch:
            del self._unsaved[chunk]
        self._store(batch)

    def _under_pressure(self) -> bool:
        """Whether the next steps may take blocks that hold something."""
        pool = self._kv.pool
        return pool.num_blank < max(MIN_BLANK * pool.num_blocks, self._kv.blocks_in_flight)

    def _store(self, chunks: Iterable[tuple[Chunk, list[bytes]]]) -> None:
        """Has chunks, with the names of their blocks, copied to slots: as far as there is room for them, and use."""
        moves: list[ChunkMove] = []
        stored: list[Chunk] = []
        blocks: list[int] = []
        for chunk, names in chunks:
            found = self._found_blocks(chunk, names)
            slot = self._host.take(chunk) if found else None
            if slot is None:
                continue
            for block in found:
                self._kv.pool.share(block)
            moves.append(ChunkMove(slot, chunk[0], 0, found))
            stored.append(chunk)
            blocks += found
        if moves:
            self._jobs.add(Job(StoreChunks(self._jobs.number(), self.confirmed_step, moves), stored, blocks))

    def _found_blocks(self, chunk: Chunk, names: list[bytes]) -> list[int]:
        """Empty when it is in a slot already, not all of it is on the device, or what is free of it has been promised to others."""
        if self._host.expects(chunk):
            return []
        found = [self._kv.pool.find(chunk[0], name) for name in names]
        blocks = [block for block in found if block is not None]
        free = sum(map(self._kv.pool.is_free, blocks))
        if len(blocks) < len(names) or (free and free > self._kv.num_available - self._headroom):
            return []
        return blocks

    def swap_out(self, request: RequestState) -> None:
        """Copies what a request that is about to be preempted has computed, if that is cheaper than computing it again."""
        chain, count = request.holding.chain.names, request.computed // CHUNK
        count = min(count, len(chain) // self._blocks)
        needed = list(self._map.needed(chain[self._blocks - 1 :: self._blocks], 0, count))
        if Gate.KV_LOAD in request.gates or not self.costs.swap_pays(request.computed, len(needed)):
            return
        for chunk, _ in needed:
            self._unsaved.pop(chunk, None)
        self._store((chunk, chain[at * self._blocks : (at + 1) * self._blocks]) for chunk, at in needed)

    def _keep(self) -> None:
        """Has some of what came to slots written outside: in turns, so that most slots stay free to be used for others."""
        if self._jobs.of(KeepChunks):
            return
        kept: list[Chunk] = []
        while self._unkept and len(kept) < min(KEEP_BATCH, most_kept(self._host.num_slots)):
            chunk, _ = self._unkept.popitem(last=False)
            if self._host.has(chunk):
                kept.append(chunk)
        if kept:
            order = KeepChunks(self._jobs.number(), [ChunkAt(self._host.pin(chunk), *chunk) for chunk in kept])
            self._jobs.add(Job(order, kept))

    # ---- answers ----

    def take(self, done: Done) -> list[RequestState]:
        """An order has been carried out, or not; returns the requests that cannot have what they were promised."""
        job = self._jobs.end(done.job)
        for block in job.blocks:
            self._kv.pool.release(block)
        failed: list[RequestState] = []
        match job.order:
            case FindChunks():
                found = {chunk for chunk, has in zip(job.chunks, done.done, strict=True) if has}
                for request, run in job.waiting if found else ():
                    if request.run == run and request.awaited:
                        self._fetch(request, found)
            case FetchChunks():
                self._settle(job.chunks, done.done)
                self._claim_fetched(job)
                if any(done.done) and not self._jobs.of(FetchChunks):  # beside others it would have waited for them too
                    self.costs.fetched(sum(done.done), self._jobs.age(job))
            case StoreChunks():
                self._settle(job.chunks, done.done)
                self.costs.stored(len(job.chunks), done.seconds)
                if self._far:
                    self._unkept.update(self._failed)
                    self._failed.clear()
                    self._note(self._unkept, job.chunks)
                    self._keep()
                self._save()
            case LoadChunks():
                self._unpin(job.chunks)
                for chunk in job.chunks:
                    self._host.use(chunk)
                self.costs.loaded(len(job.chunks), done.seconds)
                failed = self._loaded(job, all(done.done))
            case KeepChunks():
                self._unpin(job.chunks)
                self._note(self._failed, [chunk for chunk, kept in zip(job.chunks, done.done, strict=True) if not kept])
                if any(done.done):  # else the rest would fail as well
                    self._keep()
        self._count(job, done)
        self._end_wait(job)
        self._claims.look_again()
        return failed

    def _count(self, job: Job, done: Done) -> None:
        cpu, moved = self.stats["cpu"], sum(done.done) * self._chunk_bytes
        cpu.bytes, cpu.blocks, cpu.evictions_total = len(self._host) * self._chunk_bytes, len(self._host), self._host.evictions
        match job.order:
            case StoreChunks():
                cpu.stored_bytes_total += moved
                cpu.store_seconds_total += done.seconds
            case LoadChunks():
                cpu.loaded_bytes_total += moved
                cpu.load_seconds_total += done.seconds
        for name, report in done.far.items():
            _take_report(self.stats[name], report)

    def _claim_fetched(self, job: Job) -> None:
        """What has come stays in its slots for those that wait for it, as far as it is of their prefix."""
        for request, run in job.waiting:
            if request.run == run:
                names = set(self._map.names(request.holding, request.tokens))
                self._claims.claim(request.record.id, [chunk for chunk in job.chunks if chunk[1] in names])

    def _note(self, notes: OrderedDict[Chunk, None], chunks: list[Chunk]) -> None:
        """Of no more than there are slots, the newest."""
        notes.update((chunk, None) for chunk in chunks)
        while len(notes) > self._host.num_slots:
            notes.popitem(last=False)

    def _settle(self, chunks: list[Chunk], arrived: list[bool]) -> None:
        for chunk, there in zip(chunks, arrived, strict=True):
            self._host.settle(chunk, arrived=there)

    def _unpin(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._host.unpin(chunk)

    def _loaded(self, job: Job, done: bool) -> list[RequestState]:
        """The first that waits is whose blocks they are; what has been loaded has names from now on."""
        request, run = job.waiting[0]
        if request.run != run:
            return []
        if not done:
            return [request]
        self._kv.remember(request.holding, request.tokens, request.computed)
        request.holding.saved_chunks = request.computed // CHUNK
        return []

    def clear(self) -> None:
        """Forgets what the CPU tier has."""
        self._claims.clear()
        self._host.clear()
        self._unsaved.clear()
        self._unkept.clear()
        self._failed.clear()

    def check_integrity(self, waiting: set[str]) -> None:
        """Asserts that slots, jobs and claims agree, and that these are of `waiting` requests."""
        self._host.check_integrity()
        moved = sum(len(job.chunks) for job in self._jobs if not isinstance(job.order, FindChunks))
        assert self._host.num_pins == moved + self._claims.num_pins
        assert self._claims.requests <= waiting

    def pinned_blocks(self) -> list[list[int]]:
        """Of each job."""
        return [job.blocks for job in self._jobs]


def _take_report(stats: TierStats, report: FarReport) -> None:
    """Reports of several threads and ranks may pass each other: what only grows does so here too."""
    held = report.held
    stats.bytes, stats.blocks = held.bytes, held.objects
    stats.queries_total = max(stats.queries_total, report.queries)
    stats.hits_total = max(stats.hits_total, report.hits)
    stats.stored_bytes_total = max(stats.stored_bytes_total, report.written_bytes)
    stats.loaded_bytes_total = max(stats.loaded_bytes_total, report.read_bytes)
    stats.store_seconds_total = max(stats.store_seconds_total, report.write_seconds)
    stats.load_seconds_total = max(stats.load_seconds_total, report.read_seconds)
    stats.evictions_total = max(stats.evictions_total, held.evicted)
    stats.errors_total = max(stats.errors_total, held.errors)
    stats.corrupt_total = max(stats.corrupt_total, held.corrupt)
    stats.refused_total = max(stats.refused_total, held.refused)
