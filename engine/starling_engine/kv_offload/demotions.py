"""Stores chunks from the device to the primary tier: at once where there are secondary tiers, else before they are evicted."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from starling_engine.kv.events import BlockSpan
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkCopy, StoreChunks
from starling_engine.kv_offload.policies import SwapPolicy, TransferCosts
from starling_engine.kv_offload.primary import Chunk, PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.write_back import WriteBack
from starling_engine.request_state import Gate, RequestState

STORE_BATCH = 16
"""Chunks of one order; there is one such order at a time."""
MIN_BLANK = 1 / 8
"""Share of the device's blocks to be free without losing anything; below it, cached chunks are stored."""


class Demotions:
    """Stores chunks of confirmed tokens, and passes them on to be written back."""

    def __init__(
        self,
        kv: KVManager,
        chunks: ChunkMap,
        primary: PrimaryIndex,
        jobs: TransferJobs,
        costs: TransferCosts,
        swap: SwapPolicy,
        write_back: WriteBack,
    ) -> None:
        self._kv = kv
        self._map = chunks
        self._primary = primary
        self._jobs = jobs
        self._costs = costs
        self._swap = swap
        self._write_back = write_back
        self._unstored: OrderedDict[Chunk, BlockSpan] = OrderedDict()
        """Chunks of confirmed tokens that are on the device alone, with their blocks."""
        self._headroom = 0
        """Blocks that running requests may need next."""
        self.confirmed_step = -1
        """The last step whose results are known."""

    @property
    def urgent(self) -> bool:
        """True if chunks are to be stored that a crash would lose."""
        return self._write_back.enabled and bool(self._unstored)

    def note(self, request: RequestState) -> None:
        """Notes the request's chunks that have become full of confirmed tokens."""
        sequence, blocks = request.blocks, self._map.blocks
        while (sequence.stored_chunks + 1) * blocks <= sequence.cached_blocks:
            span = self._map.span(sequence, request.tokens, sequence.stored_chunks)
            for group in self._map.groups:
                self._unstored[group, span.hashes[-1]] = span
            sequence.stored_chunks += 1
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
        count = min(request.computed // CHUNK, len(chain) // blocks)
        needed = list(self._map.needed(chain[blocks - 1 :: blocks], 0, count))
        if Gate.KV_LOAD in request.gates or not self._swap.pays(request.computed, len(needed)):
            return False
        for chunk, _ in needed:
            self._unstored.pop(chunk, None)
        self._store((chunk, self._map.span(request.blocks, request.tokens, at)) for chunk, at in needed)
        return count > 0

    def complete(self, job: TransferJob, done: list[bool], seconds: float) -> None:
        """Handles the answer to an order: chunks that came are to be written back, and the next ones are stored."""
        for chunk, arrived in zip(job.chunks, done, strict=True):
            self._primary.settle(chunk, arrived=arrived)
        self._primary.renew(job.chunks)
        self._costs.stored(len(job.chunks), seconds)
        self._write_back.add(job.chunks)
        self._store_next()

    def invalidate(self, hashes: Sequence[bytes]) -> None:
        """Drops chunks that end in one of these block hashes."""
        for chunk in [(group, name) for group in self._map.groups for name in hashes]:
            self._unstored.pop(chunk, None)
            self._primary.drop(chunk)

    def clear(self) -> None:
        self._unstored.clear()

    def _store_next(self) -> None:
        if self._jobs.of(StoreChunks) or not (self._write_back.enabled or self._under_pressure()):
            return
        batch: list[tuple[Chunk, BlockSpan]] = []
        while self._unstored and len(batch) < STORE_BATCH:
            chunk, span = self._unstored.popitem(last=False)
            if self._found_blocks(chunk, span.hashes):  # else it takes no other one's place
                batch.append((chunk, span))
        self._store(batch)

    def _under_pressure(self) -> bool:
        """Returns whether the next steps may take blocks that hold something."""
        pool = self._kv.pool
        return pool.num_blank < max(MIN_BLANK * pool.num_blocks, self._kv.blocks_in_flight)

    def _store(self, chunks: Iterable[tuple[Chunk, BlockSpan]]) -> None:
        """Orders chunks into slots, those for which there is room and whose blocks may be held meanwhile."""
        copies: list[ChunkCopy] = []
        stored: list[Chunk] = []
        blocks: list[int] = []
        for chunk, span in chunks:
            found = self._found_blocks(chunk, span.hashes)
            slot = self._primary.allocate(chunk, span) if found and self._may_hold(found) else None
            if slot is None:
                continue
            for block in found:
                self._kv.pool.share(block)
            copies.append(ChunkCopy(slot, chunk[0], 0, found))
            stored.append(chunk)
            blocks += found
        if copies:
            self._jobs.add(TransferJob(StoreChunks(self._jobs.number(), self.confirmed_step, copies), stored, blocks))

    def _found_blocks(self, chunk: Chunk, hashes: list[bytes]) -> list[int]:
        """Returns the chunk's blocks; none when it is in a slot already, or not all of it is on the device."""
        if self._primary.expects(chunk):
            return []
        found = [self._kv.pool.find(chunk[0], name) for name in hashes]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(hashes) else []

    def _may_hold(self, blocks: list[int]) -> bool:
        """Returns whether these blocks may be held: not when the free ones among them have been promised to others."""
        free = sum(map(self._kv.pool.is_free, blocks))
        return not free or free <= self._kv.num_available - self._headroom
