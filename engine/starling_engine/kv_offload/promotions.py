"""From the tiers outside to slots: while a request waits, what it could use is looked for there, and brought."""

from starling_engine.kv_offload.bypass import Bypass
from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.costs import Costs
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.lookups import Lookup, Lookups
from starling_engine.kv_offload.orders import ChunkSlot, LookUpChunks, PromoteChunks
from starling_engine.kv_offload.pin_quota import PinQuota
from starling_engine.kv_offload.primary import Chunk, PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.request_state import RequestState

FETCH_SECONDS = 3.0
"""How long a request waits for what the tiers outside have."""
FETCH_BATCH = 16
"""Chunks that are brought by one order, and so are of use as soon as they have come, however late those behind them are."""


class Promotions:
    """A request is parked until the tiers outside have said what they have, and again until that has come.

    From then on it claims its chunks, which stay in their slots until it is admitted; one that finds no room for them is put off
    until its turn comes. Without tiers outside (`far` is False) there is nothing to ask for.

    Where asking does not pay, requests pass. What some ask all the same, as probes, parks nobody and claims nothing.
    """

    def __init__(
        self,
        chunks: ChunkMap,
        host: PrimaryIndex,
        jobs: TransferJobs,
        claims: PinQuota,
        costs: Costs,
        counts: OffloadStats,
        *,
        far: bool,
    ) -> None:
        self._map = chunks
        self._host = host
        self._jobs = jobs
        self._claims = claims
        self._asks = Lookups(chunks, jobs, costs)
        self._bypass = Bypass(costs)
        self._counts = counts
        self._far = far

    # ---- of a request that waits ----

    def arrive(self, request: RequestState) -> bool:
        """Asks the tiers outside for what a request could use that waits; it is parked until they have answered.

        Returns False when there was nothing to ask for, as the device and the CPU tier have it all.
        """
        if not self._far or request.skips_tiers or not request.reads_prefix_cache or len(request.tokens) <= CHUNK:
            return False
        names = self._map.names(request.holding, request.tokens)
        first = self._map.on_device(request.holding, request.tokens)
        asked = [(group, name) for name in names[first:] for group in self._map.groups]
        if all(map(self._host.has, asked)):
            return False
        passes = self._passes()
        if passes:
            self._counts.passed_by()
        if not passes or self._probes():
            self._ask(Lookup(request, names, first, is_probe=passes), asked)
        return True

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

    def forget(self, request: RequestState) -> None:
        """A request that was waiting does so no more: nothing has to be kept for it."""
        self._asks.forget(request)
        self._claims.forget(request.record.id)

    def open_late(self) -> None:
        """Lets requests go whose chunks take too long. What still comes is of use to others."""
        for job in self._late():
            job.let_go()
            self._asks.end_order(job)

    # ---- answers ----

    def found(self, job: TransferJob, done: list[bool]) -> None:
        """The tiers outside have said which chunks of an order they have."""
        found = {chunk for chunk, has in zip(job.chunks, done, strict=True) if has}
        for ask in self._asks.of(job) if found else ():
            self._fetch(ask, found)
        self._asks.end_order(job)

    def fetched(self, job: TransferJob, done: list[bool]) -> None:
        """Chunks have come, or have not. Those that have stay for those that wait for them, as far as they are of their prefix."""
        for chunk, there in zip(job.chunks, done, strict=True):
            self._host.settle(chunk, arrived=there)
        came = {chunk for chunk, there in zip(job.chunks, done, strict=True) if there}
        for ask in self._asks.of(job):
            ask.came |= came
            if not ask.is_probe:
                names = set(ask.names)
                self._claims.claim(ask.request.record.id, [chunk for chunk in job.chunks if chunk[1] in names])
        self._asks.end_order(job)

    # ---- what is asked ----

    def _ask(self, ask: Lookup, wanted: list[Chunk]) -> None:
        """Waits for those that are on their way, and has the others looked for."""
        self._asks.begin(ask)
        self._await_coming(ask, wanted)
        unknown = [chunk for chunk in wanted if not self._host.expects(chunk)]
        if unknown:
            order = LookUpChunks(self._jobs.number(), [ChunkSlot(-1, *chunk) for chunk in unknown])
            ask.await_job(self._jobs.add(TransferJob(order, unknown)))
        self._asks.end_idle(ask)

    def _fetch(self, ask: Lookup, found: set[Chunk]) -> None:
        """Has the longest prefix that there is brought to slots, of as much as there are."""
        request, names = ask.request, ask.names
        if not ask.is_probe:  # else its request is likely to have computed some of it meanwhile
            ask.first = self._map.on_device(request.holding, request.tokens)
        count = self._map.longest(names, ask.first, lambda chunk: chunk in found or self._host.expects(chunk))
        places = dict(sorted(self._map.needed(names, ask.first, count), key=lambda each: each[1]))
        needed = list(places)
        self._await_coming(ask, needed)
        missing = {chunk: at for chunk, at in places.items() if not self._host.expects(chunk)}
        if not self._claims.has_room(request.record.id, needed):
            if missing and not ask.is_probe:
                self._claims.put_off(request.record.id, needed)
            return
        for chunk in filter(self._host.has, reversed(needed)):
            self._host.use(chunk)
        if not ask.is_probe:
            self._claims.claim(request.record.id, needed)
        self._bring(ask, missing)

    def _bring(self, ask: Lookup, places: dict[Chunk, int]) -> None:
        """Orders as many of these chunks, with their places in the prefix, as there are slots for: its beginning first."""
        coming: list[tuple[Chunk, ChunkSlot]] = []
        for chunk, at in places.items():
            slot = self._host.take(chunk, self._map.span(ask.request.holding, ask.request.tokens, at))
            if slot is None:
                break
            coming.append((chunk, ChunkSlot(slot, *chunk)))
        for start in range(0, len(coming), FETCH_BATCH):
            batch = coming[start : start + FETCH_BATCH]
            order = PromoteChunks(self._jobs.number(), [at for _, at in batch])
            ask.await_job(self._jobs.add(TransferJob(order, [chunk for chunk, _ in batch])))

    # ---- whether to ask ----

    def _passes(self) -> bool:
        """Whether a request is to compute rather than to ask the tiers outside."""
        return self._hang() or self._bypass.passes(self._jobs.now())

    def _probes(self) -> bool:
        """Whether one that passes asks all the same: one at a time, and none of tiers that hang."""
        return not self._hang() and self._bypass.probe_is_due() and not self._asks.probing

    # ---- what is on its way ----

    def _await_coming(self, ask: Lookup, chunks: list[Chunk]) -> None:
        """Of these chunks, what is being fetched for others; the rest of what is expected is no gain of this one."""
        ask.there = set(filter(self._host.expects, chunks)) - ask.came
        for job in self._jobs.bringing(PromoteChunks, chunks):
            ask.await_job(job)
            ask.there.difference_update(job.chunks)

    def _late(self) -> list[TransferJob]:
        return [job for job in self._jobs.older_than(FETCH_SECONDS) if isinstance(job.order, LookUpChunks | PromoteChunks)]

    def _hang(self) -> bool:
        """Whether the tiers outside do: nobody else is to wait for them."""
        return bool(self._late())
