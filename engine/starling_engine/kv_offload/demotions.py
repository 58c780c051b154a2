"""From the device to slots: at once where there are tiers outside, else before the device gives up what it has cached."""

from collections import OrderedDict
from collections.abc import Iterable

from starling_engine.kv.events import BlockSpan
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.costs import Costs
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkCopy, StoreChunks
from starling_engine.kv_offload.primary import Chunk, PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.write_back import WriteBack
from starling_engine.request_state import Gate, RequestState

STORE_BATCH = 16
"""Chunks that are copied to slots by one order; there is one such order at a time."""
MIN_BLANK = 1 / 8
"""Share of the device's blocks that are to be free without losing anything; below it, what is cached is copied to the CPU tier."""


class Demotions:
    """`keeps` has what was copied written outside; None without tiers there."""

    def __init__(
        self, kv: KVManager, chunks: ChunkMap, host: PrimaryIndex, jobs: TransferJobs, costs: Costs, keeps: WriteBack | None
    ) -> None:
        self._kv = kv
        self._map = chunks
        self._host = host
        self._jobs = jobs
        self._costs = costs
        self._keeps = keeps
        self._unsaved: OrderedDict[Chunk, BlockSpan] = OrderedDict()
        """Chunks of confirmed tokens that are on the device alone, with their blocks."""
        self._headroom = 0
        """Blocks that running requests may need next."""
        self.confirmed_step = -1
        """The last step of which the results are known."""

    @property
    def urgent(self) -> bool:
        """Whether something is to be written that a crash would lose."""
        return self._keeps is not None and bool(self._unsaved)

    def confirm(self, request: RequestState) -> None:
        """Notes the chunks that have become full of confirmed tokens."""
        holding, blocks = request.holding, self._map.blocks
        while (holding.saved_chunks + 1) * blocks <= holding.cached_blocks:
            span = self._map.span(holding, request.tokens, holding.saved_chunks)
            for group in self._map.groups:
                self._unsaved[group, span.names[-1]] = span
            holding.saved_chunks += 1
        while len(self._unsaved) > self._kv.pool.num_blocks:
            self._unsaved.popitem(last=False)

    def save(self, running: int) -> None:
        """Has some chunks copied to slots, where it is time; leaves the `running` requests blocks to grow into."""
        self._headroom = running * len(self._map.groups)
        self._save()

    def swap_out(self, request: RequestState) -> None:
        """Copies what a request that is about to be preempted has computed, if that is cheaper than computing it again."""
        chain, blocks = request.holding.chain.names, self._map.blocks
        count = min(request.computed // CHUNK, len(chain) // blocks)
        needed = list(self._map.needed(chain[blocks - 1 :: blocks], 0, count))
        if Gate.KV_LOAD in request.gates or not self._costs.swap_pays(request.computed, len(needed)):
            return
        for chunk, _ in needed:
            self._unsaved.pop(chunk, None)
        self._store((chunk, self._map.span(request.holding, request.tokens, at)) for chunk, at in needed)

    def stored(self, job: TransferJob, done: list[bool], seconds: float) -> None:
        """An order has been answered: what has come to slots is passed on, and the next ones follow."""
        for chunk, there in zip(job.chunks, done, strict=True):
            self._host.settle(chunk, arrived=there)
        self._host.renew(job.chunks)
        self._costs.stored(len(job.chunks), seconds)
        if self._keeps is not None:
            self._keeps.add(job.chunks)
        self._save()

    def forget(self, names: list[bytes]) -> None:
        """Chunks that end in one of these names hold what may be wrong. What lies outside already stays there."""
        for chunk in [(group, name) for group in self._map.groups for name in names]:
            self._unsaved.pop(chunk, None)
            self._host.give_up(chunk)

    def clear(self) -> None:
        self._unsaved.clear()

    def _save(self) -> None:
        if self._jobs.of(StoreChunks) or not (self._keeps is not None or self._under_pressure()):
            return
        batch: list[tuple[Chunk, BlockSpan]] = []
        while self._unsaved and len(batch) < STORE_BATCH:
            chunk, span = self._unsaved.popitem(last=False)
            if self._found_blocks(chunk, span.names):  # else it takes no other one's place
                batch.append((chunk, span))
        self._store(batch)

    def _under_pressure(self) -> bool:
        """Whether the next steps may take blocks that hold something."""
        pool = self._kv.pool
        return pool.num_blank < max(MIN_BLANK * pool.num_blocks, self._kv.blocks_in_flight)

    def _store(self, chunks: Iterable[tuple[Chunk, BlockSpan]]) -> None:
        """Has chunks, with their blocks, copied to slots: as far as there is room for them, and use."""
        moves: list[ChunkCopy] = []
        stored: list[Chunk] = []
        blocks: list[int] = []
        for chunk, span in chunks:
            found = self._found_blocks(chunk, span.names)
            slot = self._host.take(chunk, span) if found and self._may_hold(found) else None
            if slot is None:
                continue
            for block in found:
                self._kv.pool.share(block)
            moves.append(ChunkCopy(slot, chunk[0], 0, found))
            stored.append(chunk)
            blocks += found
        if moves:
            self._jobs.add(TransferJob(StoreChunks(self._jobs.number(), self.confirmed_step, moves), stored, blocks))

    def _found_blocks(self, chunk: Chunk, names: list[bytes]) -> list[int]:
        """Empty when it is in a slot already, or not all of it is on the device."""
        if self._host.expects(chunk):
            return []
        found = [self._kv.pool.find(chunk[0], name) for name in names]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(names) else []

    def _may_hold(self, blocks: list[int]) -> bool:
        """Not when those that are free have been promised to others."""
        free = sum(map(self._kv.pool.is_free, blocks))
        return not free or free <= self._kv.num_available - self._headroom
