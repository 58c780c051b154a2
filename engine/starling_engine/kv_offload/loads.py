"""From slots to the device: a request is admitted with blocks that are still empty, and parked until its chunks are in them."""

from starling_engine.kv.manager import KVManager
from starling_engine.kv.pool import NULL_BLOCK
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.costs import Costs
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.orders import ChunkCopy, LoadChunks
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.request_state import Gate, RequestState


class Loads:
    """What slots have beyond the `hit` blocks that a request finds on the device."""

    def __init__(self, kv: KVManager, chunks: ChunkMap, host: PrimaryIndex, jobs: TransferJobs, costs: Costs) -> None:
        self._kv = kv
        self._map = chunks
        self._host = host
        self._jobs = jobs
        self._costs = costs

    def match(self, request: RequestState, hit: int) -> int:
        """Chunks, counted from the start, that the request has on the device and then in slots; 0 for no gain."""
        if request.skips_tiers or len(request.tokens) <= CHUNK:
            return 0
        names, blocks = self._map.names(request.holding, request.tokens), self._map.blocks
        count = self._map.longest(names, hit // blocks, self._host.has)
        return count if count * blocks > hit else 0

    def lookup(self, request: RequestState, hit: int, count: int) -> tuple[int, int]:
        """For one that is admitted with `count` chunks: those that it looked for in slots, and those that it found there."""
        names, first = self._map.names(request.holding, request.tokens), hit // self._map.blocks
        asked, found = self._map.needed(names, first, len(names)), self._map.needed(names, first, count)
        return sum(1 for _ in asked), sum(1 for _ in found)

    def awaits_others(self, request: RequestState, hit: int, count: int) -> bool:
        """Whether others load the same now: it then waits for theirs."""
        names = self._map.names(request.holding, request.tokens)
        wanted = [chunk for chunk, _ in self._map.needed(names, hit // self._map.blocks, count)]
        for job in self._jobs.bringing(LoadChunks, wanted):
            job.park(request, Gate.KV_LOAD)
        return Gate.KV_LOAD in request.gates

    def load(self, request: RequestState, hit: int, count: int, after: int) -> None:
        """Fills the request's blocks from the `hit`-th on, once step `after` has run, and parks it until they are there."""
        holding, names, size = request.holding, self._map.names(request.holding, request.tokens), self._map.blocks
        moves, chunks, blocks = [], [], []
        for chunk, at in self._map.needed(names, hit // size, count):
            table = holding.tables[chunk[0]][max(at * size, hit) : (at + 1) * size]
            wanted = [block for block in table if block != NULL_BLOCK]
            moves.append(ChunkCopy(self._host.pin(chunk), chunk[0], size - len(wanted), wanted))
            chunks.append(chunk)
            blocks += wanted
        for block in blocks:
            self._kv.pool.share(block)
        order = LoadChunks(self._jobs.number(), after, moves)
        self._jobs.add(TransferJob(order, chunks, blocks)).park(request, Gate.KV_LOAD)

    def loaded(self, job: TransferJob, done: list[bool], seconds: float) -> list[RequestState]:
        """An order has been answered; returns the request that cannot have what it was promised, if there is one."""
        for chunk in job.chunks:
            self._host.unpin(chunk)
        for chunk in job.chunks:
            self._host.use(chunk)
        self._host.renew(job.chunks)  # with the beginning, which the device had
        self._costs.loaded(len(job.chunks), seconds)
        request, run = job.waiting[0]  # whose blocks they are; others wait for the same chunks
        if request.run != run:
            return []
        if not all(done):
            return [request]
        self._kv.remember(request.holding, request.tokens, request.computed)
        request.holding.saved_chunks = request.computed // CHUNK
        return []
