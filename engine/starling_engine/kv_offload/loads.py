"""Loads chunks from the primary tier: a request starts with empty blocks, and is parked until its chunks are in them."""

from starling_engine.kv.manager import KVManager
from starling_engine.kv.pool import NULL_BLOCK
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkCopy, LoadChunks
from starling_engine.kv_offload.policies import TransferCosts
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.request_state import Gate, RequestState


class Loads:
    """Chunks in slots beyond the `hit` blocks that a request finds on the device."""

    def __init__(self, kv: KVManager, chunks: ChunkMap, primary: PrimaryIndex, jobs: TransferJobs, costs: TransferCosts) -> None:
        self._kv = kv
        self._map = chunks
        self._primary = primary
        self._jobs = jobs
        self._costs = costs

    def match(self, request: RequestState, hit: int) -> int:
        """Returns the chunks of the prefix that are on the device and then in slots; 0 for no gain."""
        if request.skips_tiers or len(request.tokens) <= CHUNK:
            return 0
        hashes, blocks = self._map.hashes(request.blocks, request.tokens), self._map.blocks
        count = self._map.longest(hashes, hit // blocks, self._primary.has)
        return count if count * blocks > hit else 0

    def count(self, request: RequestState, hit: int, count: int) -> tuple[int, int]:
        """Returns how many chunks a request that starts with `count` of them looked for in slots, and found there."""
        hashes, first = self._map.hashes(request.blocks, request.tokens), hit // self._map.blocks
        wanted, found = self._map.needed(hashes, first, len(hashes)), self._map.needed(hashes, first, count)
        return sum(1 for _ in wanted), sum(1 for _ in found)

    def awaits_others(self, request: RequestState, hit: int, count: int) -> bool:
        """Returns whether others load the same chunks now; the request is then parked until theirs have come."""
        hashes = self._map.hashes(request.blocks, request.tokens)
        wanted = [chunk for chunk, _ in self._map.needed(hashes, hit // self._map.blocks, count)]
        for job in self._jobs.moving(LoadChunks, wanted):
            job.park(request, Gate.KV_LOAD)
        return Gate.KV_LOAD in request.gates

    def load(self, request: RequestState, hit: int, count: int, after: int) -> None:
        """Orders `count` chunks into the request's blocks from the `hit`-th on, once step `after` has run, and parks it."""
        sequence, hashes, size = request.blocks, self._map.hashes(request.blocks, request.tokens), self._map.blocks
        copies, chunks, blocks = [], [], []
        for chunk, at in self._map.needed(hashes, hit // size, count):
            table = sequence.tables[chunk[0]][max(at * size, hit) : (at + 1) * size]
            wanted = [block for block in table if block != NULL_BLOCK]
            copies.append(ChunkCopy(self._primary.pin(chunk), chunk[0], size - len(wanted), wanted))
            chunks.append(chunk)
            blocks += wanted
        for block in blocks:
            self._kv.pool.share(block)
        order = LoadChunks(self._jobs.number(), after, copies)
        self._jobs.add(TransferJob(order, chunks, blocks)).park(request, Gate.KV_LOAD)

    def complete(self, job: TransferJob, done: list[bool], seconds: float) -> list[RequestState]:
        """Handles the answer to an order; returns the request that cannot have the chunks it was promised, if there is one."""
        for chunk in job.chunks:
            self._primary.unpin(chunk)
        for chunk in job.chunks:
            self._primary.touch(chunk)
        self._primary.renew(job.chunks)  # with the beginning, which the device had
        self._costs.loaded(len(job.chunks), seconds)
        request, run = job.waiting[0]  # whose blocks they are; others wait for the same chunks
        if request.run != run:
            return []
        if not all(done):
            return [request]
        self._kv.remember(request.blocks, request.tokens, request.computed)
        request.blocks.stored_chunks = request.computed // CHUNK
        return []
