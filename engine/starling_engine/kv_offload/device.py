"""Stores chunks from the device to the primary tier, and loads them from there into the blocks of requests that start."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from starling_engine.kv.events import BlockSpan
from starling_engine.kv.manager import KVManager
from starling_engine.kv.pool import NULL_BLOCK
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.jobs import BATCH, TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkSlot
from starling_engine.kv_offload.policies import SwapPolicy, TransferCosts
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK, Chunk
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.kv_offload.write_back import WriteBack
from starling_engine.request_state import Gate, RequestState

MIN_BLANK = 1 / 8
"""Share of the device's blocks to be free without losing anything; below it, cached chunks are stored."""


class DeviceTransfers:
    """Copies of chunks between the device and the primary tier.

    A request with chunks in slots starts with empty blocks, and is parked until they have come. Chunks of confirmed tokens are
    stored at once where there are secondary tiers, and passed on to be written back; else before they are evicted.
    """

    def __init__(
        self,
        kv: KVManager,
        chunks: ChunkMap,
        primary: PrimaryIndex,
        jobs: TransferJobs,
        costs: TransferCosts,
        swap: SwapPolicy,
        write_back: WriteBack,
        stats: OffloadStats,
    ) -> None:
        self._kv = kv
        self._map = chunks
        self._primary = primary
        self._jobs = jobs
        self._costs = costs
        self._swap = swap
        self._write_back = write_back
        self._stats = stats
        self._unstored: OrderedDict[Chunk, BlockSpan] = OrderedDict()
        """Chunks of confirmed tokens that are on the device alone, with their blocks."""
        self._headroom = 0
        """Blocks that running requests may need next."""
        self.confirmed_step = -1
        """The last step whose results are known."""

    # ---- loads ----

    def lookup(self, request: RequestState, hit: int) -> int | None:
        """Returns as OffloadManager.lookup does."""
        if request.skips_tiers or len(request.tokens) <= CHUNK:
            return 0
        hashes, first = self._map.hashes(request), hit // self._map.blocks
        count = self._map.longest(hashes, first, self._primary.has)
        if count * self._map.blocks <= hit:
            return 0
        for job in self._jobs.moving("load", [chunk for chunk, _ in self._map.needed(hashes, first, count)]):
            job.park(request, Gate.KV_LOAD)
        return None if Gate.KV_LOAD in request.gates else count * CHUNK

    def count_lookup(self, request: RequestState, hit: int, length: int) -> int:
        """Counts the chunks that a request which starts with `length` tokens looked for in slots, and found there."""
        hashes, first = self._map.hashes(request), hit // self._map.blocks
        self._stats.cpu.queries_total += sum(1 for _ in self._map.needed(hashes, first, len(hashes)))
        self._stats.cpu.hits_total += sum(1 for _ in self._map.needed(hashes, first, length // CHUNK))
        return len(request.tokens) - hit * self._kv.block_size

    def load(self, request: RequestState, hit: int, length: int, after: int) -> None:
        """Orders chunks into the request's blocks from the `hit`-th on, once step `after` has run, and parks it."""
        hashes, size = self._map.hashes(request), self._map.blocks
        coming = []
        state = self._kv.external_state(request.blocks, length)
        for (group, name), at in self._map.needed(hashes, hit // size, length // CHUNK):
            if group in self._map.pieces:
                blocks, first = self._map.piece(group, state), 0
            else:
                table = request.blocks.tables[group][max(at * size, hit) : (at + 1) * size]
                blocks = [block for block in table if block != NULL_BLOCK]
                first = size - len(blocks)
            self._hold(blocks)
            coming.append(ChunkSlot(self._primary.pin((group, name)), group, name, first, blocks))
        self._jobs.order("load", coming, after).park(request, Gate.KV_LOAD)

    def complete_load(self, job: TransferJob, seconds: float) -> list[RequestState]:
        """Returns the request that cannot have the chunks it was promised, if there is one."""
        for chunk in job.chunks:
            self._primary.touch(chunk)
        self._primary.renew(job.chunks)  # with the beginning, which the device had
        self._costs.loaded(len(job.chunks), seconds)
        request, run = job.waiting[0]  # whose blocks they are; others wait for the same chunks
        if request.run != run:
            return []
        if not all(job.outcome.values()):
            return [request]
        self._kv.cache_blocks(request.blocks, request.tokens, request.computed)
        self._kv.cache_external_state(request.blocks, request.tokens, request.computed)
        request.blocks.stored_chunks = request.computed // CHUNK
        return []

    # ---- stores ----

    @property
    def urgent(self) -> bool:
        """True if chunks are to be stored that a crash would lose."""
        return self._write_back.enabled and bool(self._unstored)

    def note(self, request: RequestState) -> None:
        """Notes the request's chunks that have become full of confirmed tokens."""
        sequence, blocks = request.blocks, self._map.blocks
        while (sequence.stored_chunks + 1) * blocks <= sequence.cached_blocks:
            span = self._map.span(request, sequence.stored_chunks)
            for group in self._map.groups:
                self._unstored[group, span.hashes[-1]] = span
            sequence.stored_chunks += 1
        self._limit_unstored()

    def note_snapshots(self, request: RequestState, lengths: Iterable[int]) -> None:
        """Notes snapshots of the request's state at these lengths, which have names now."""
        for at in (length // CHUNK - 1 for length in lengths):
            name = request.blocks.chain.hashes[(at + 1) * self._map.blocks - 1]
            self._unstored.update(dict.fromkeys(self._map.snapshot(name), self._map.span(request, at)))
        self._limit_unstored()

    def _limit_unstored(self) -> None:
        while len(self._unstored) > self._kv.pool.num_blocks:
            self._unstored.popitem(last=False)

    def store_next(self, running: int) -> None:
        """Orders the next chunks into slots, if it is time; leaves the `running` requests blocks to grow into."""
        self._headroom = running * len(self._map.groups)
        self._store_next()

    def swap_out(self, request: RequestState) -> bool:
        """Stores the chunks of a request that is about to be preempted, if that is cheaper than computing them again.

        Returns whether it has chunks that are stored.
        """
        chain, blocks = request.blocks.chain.hashes, self._map.blocks
        hashes = chain[blocks - 1 :: blocks][: request.computed // CHUNK]
        count = self._swappable(hashes)
        needed = list(self._map.needed(hashes, 0, count))
        if Gate.KV_LOAD in request.gates or not self._swap.pays(request.computed, len(needed)):
            return False
        for chunk, _ in needed:
            self._unstored.pop(chunk, None)
        self._store((chunk, self._map.span(request, at)) for chunk, at in needed)
        return count > 0

    def _swappable(self, hashes: list[bytes]) -> int:
        """Returns how many chunks are of use to a request that starts anew: of a state, those up to its last snapshot."""
        counts = range(len(hashes), 0, -1)
        if not self._map.pieces:
            return len(hashes)
        return next((count for count in counts if self._kv.find_snapshot(hashes[count - 1]) is not None), 0)

    def complete_store(self, job: TransferJob, seconds: float) -> None:
        """Chunks that came are to be written back, and the next ones are stored."""
        self._primary.renew(job.chunks)
        self._costs.stored(len(job.chunks), seconds)
        self._write_back.add(job.chunks)
        self._store_next()

    def invalidate(self, hashes: Sequence[bytes]) -> None:
        """Drops chunks that end in one of these block hashes."""
        for chunk in [(group, name) for group in (*self._map.groups, *self._map.pieces) for name in hashes]:
            self._unstored.pop(chunk, None)
            self._primary.drop(chunk)

    def clear(self) -> None:
        self._unstored.clear()

    def _store_next(self) -> None:
        """Orders a batch of chunks, unless one is under way. A snapshot goes as a whole, before the device evicts some of it."""
        if self._jobs.of("store") or not (self._write_back.enabled or self._under_pressure()):
            return
        batch: list[tuple[Chunk, BlockSpan]] = []
        while self._unstored and (len(batch) < BATCH or self._map.follows(batch[-1][0], next(iter(self._unstored)))):
            chunk, span = self._unstored.popitem(last=False)
            if self._found_blocks(chunk, span):  # else it takes no other one's place
                batch.append((chunk, span))
        self._store(batch)

    def _under_pressure(self) -> bool:
        """Returns whether the next steps may take blocks that hold something."""
        pool = self._kv.pool
        return pool.num_blank < max(MIN_BLANK * pool.num_blocks, self._kv.blocks_in_flight)

    def _store(self, chunks: Iterable[tuple[Chunk, BlockSpan]]) -> None:
        """Orders chunks into slots, those for which there is room. Those whose blocks may not be held now wait for a next time."""
        leaving = []
        for chunk, span in chunks:
            blocks = self._found_blocks(chunk, span)
            if blocks and not self._may_hold(blocks):
                self._unstored[chunk] = span
            elif blocks and (slot := self._primary.allocate(chunk, span)) is not None:
                self._hold(blocks)
                leaving.append(ChunkSlot(slot, *chunk, 0, blocks))
        if leaving:
            self._jobs.order("store", leaving, self.confirmed_step)

    def _found_blocks(self, chunk: Chunk, span: BlockSpan) -> list[int]:
        """Returns the chunk's blocks; none when it is in a slot already, or not all of it is on the device."""
        return [] if self._primary.expects(chunk) else self._map.found_blocks(chunk, span)

    def _may_hold(self, blocks: list[int]) -> bool:
        """Returns whether these blocks may be held: not when the free ones among them have been promised to others."""
        free = sum(map(self._kv.pool.is_free, blocks))
        return not free or free <= self._kv.num_available - self._headroom

    def _hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self._kv.pool.share(block)
