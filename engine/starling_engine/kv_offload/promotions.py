"""Promotes chunks from the secondary tiers to the primary one: while a request waits, they are looked up and brought."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.jobs import BATCH, TransferJob, TransferJobs
from starling_engine.kv_offload.log_throttle import LogThrottle
from starling_engine.kv_offload.orders import ChunkSlot
from starling_engine.kv_offload.pin_quota import PinQuota
from starling_engine.kv_offload.policies import PROBE_EVERY, LookupPolicy, TransferCosts, WriteBackBudget
from starling_engine.kv_offload.primary import PrimaryIndex
from starling_engine.kv_offload.secondary.base import CHUNK, LOOKUP_SECONDS, Chunk
from starling_engine.kv_offload.stats import OffloadStats
from starling_engine.request_state import Gate, RequestState

logger = logging.getLogger("starling.offload")


@dataclass(slots=True, eq=False)
class Lookup:
    """One request's lookup, until all its orders have ended or are given up."""

    request: RequestState
    hashes: list[bytes]
    first: int
    """Chunks of the prefix that the device has."""
    began: float
    is_probe: bool
    """The request does not wait for it, and may have ended meanwhile."""
    orders: set[int] = field(default_factory=set)
    promoted: set[bytes] = field(default_factory=set)
    """Hashes of the prefix's chunks that have come."""

    def await_job(self, job: TransferJob) -> None:
        self.orders.add(job.order.job)
        if not self.is_probe:
            job.park(self.request, Gate.KV_PROMOTION)


class Promotions:
    """A request is parked until the secondary tiers have answered its lookup, and again until its chunks have come.

    From then on its chunks are pinned until it starts. A request without room for them is postponed: it looks up again when its
    turn to start comes. Where lookups do not pay, requests pass by; what some of them look up all the same, as probes, parks
    nobody and pins nothing.
    """

    def __init__(
        self,
        chunks: ChunkMap,
        primary: PrimaryIndex,
        jobs: TransferJobs,
        pins: PinQuota,
        costs: TransferCosts,
        policy: LookupPolicy,
        budget: WriteBackBudget,
        stats: OffloadStats,
        *,
        enabled: bool,
    ) -> None:
        self._map = chunks
        self._primary = primary
        self._jobs = jobs
        self._pins = pins
        self._costs = costs
        self._policy = policy
        self._budget = budget
        self._stats = stats
        self._enabled = enabled
        self._lookups: list[Lookup] = []
        self.postponed: dict[str, list[Chunk]] = {}
        """Chunks that each postponed request is to have room for, those in slots included: they are to stay until it starts."""
        self._passed_over: dict[str, float] = {}
        """Time at which there was first no room when a request's turn came."""
        self._last_end = 0.0
        """Time at which the last lookup ended."""
        self._slow = LogThrottle()
        self._logged_slow = False
        """The last line of the log about it says that the tiers are slow."""

    # ---- requests that wait ----

    def begin(self, request: RequestState) -> bool:
        """Looks up what a waiting request could use; it is parked until the tiers have answered.

        Returns False when there was nothing to look up, as the device and the primary tier have it all.
        """
        if not self._enabled or request.skips_tiers or not request.reads_prefix_cache or len(request.tokens) <= CHUNK:
            return False
        hashes = self._map.hashes(request)
        first = self._map.on_device(request)
        if self._map.has_all(hashes, first, self._primary.has):
            return False
        wanted = self._map.wanted(hashes[first:])
        hang = bool(self._late())
        passes = hang or not self._pays()
        if passes:
            self._stats.bypassed()
        if not passes or (not hang and self._probe_is_due()):
            self._look_up(Lookup(request, hashes, first, self._jobs.clock(), is_probe=passes), wanted)
        return True

    def postpone(self, request: RequestState, chunks: list[Chunk]) -> None:
        """The request looks up when its turn comes, and there is room for these chunks."""
        if self._enabled:
            self.postponed[request.record.id] = chunks

    def must_wait(self, request: RequestState) -> bool:
        """Returns whether a request that could start has to wait: it looks up now, or has no room yet for its chunks."""
        name = request.record.id
        if request.skips_tiers or name not in self.postponed:
            return False
        if not self._pins.pin_in_turn(name, self.postponed[name]):
            now = self._jobs.clock()
            waits = now - self._passed_over.setdefault(name, now) <= LOOKUP_SECONDS
            if not waits:
                del self.postponed[name]
            return waits
        if self.begin(request):
            del self.postponed[name]
        return bool(request.gates)

    def forget(self, request: RequestState) -> None:
        """The request waits no more: nothing is pinned for it."""
        name = request.record.id
        for lookup in [each for each in self._lookups if each.request is request and not each.is_probe]:
            self._end(lookup)
        self.postponed.pop(name, None)
        self._passed_over.pop(name, None)
        self._pins.forget(name)

    def release_late(self) -> None:
        """Lets requests go whose chunks take too long. Those that still come are there for others."""
        for job in self._late():
            job.let_go()
            self._end_order(job)

    # ---- answers ----

    def complete_lookup(self, job: TransferJob) -> None:
        """The secondary tiers have said which chunks of an order they have."""
        found = {chunk for chunk, has in job.outcome.items() if has}
        for lookup in self._of(job) if found else ():
            self._promote(lookup, found)
        self._end_order(job)

    def complete_promotion(self, job: TransferJob) -> None:
        """Chunks have come, or have not. They stay for the requests of whose prefix they are."""
        for lookup in self._of(job):
            hashes = set(lookup.hashes)
            lookup.promoted |= hashes.intersection(name for (_, name), arrived in job.outcome.items() if arrived)
            if not lookup.is_probe:
                self._pins.pin(lookup.request.record.id, [chunk for chunk in job.chunks if chunk[1] in hashes])
        self._end_order(job)

    # ---- orders ----

    def _look_up(self, lookup: Lookup, wanted: list[Chunk]) -> None:
        """Waits for chunks that are on their way, and orders a lookup of the others."""
        self._lookups.append(lookup)
        self._await_promotions(lookup, wanted)
        unknown = [ChunkSlot(-1, *each) for each in wanted if not all(map(self._primary.expects, self._map.looked_up_by(each)))]
        if unknown:
            lookup.await_job(self._jobs.order("look_up", unknown))
        self._end_idle(lookup)

    def _promote(self, lookup: Lookup, found: set[Chunk]) -> None:
        """Orders the longest prefix there is into slots, as much as fits."""
        request, hashes = lookup.request, lookup.hashes
        if not lookup.is_probe:  # a probe's request is likely to have computed some of it meanwhile
            lookup.first = self._map.on_device(request)
        indices = self._usable(hashes, lookup.first, lambda chunk: self._is_near(chunk, found))
        needed = list(indices)
        self._await_promotions(lookup, needed)
        missing = {chunk: at for chunk, at in indices.items() if not self._primary.expects(chunk)}
        if not self._pins.has_room(request.record.id, needed):
            if missing and not lookup.is_probe:
                self.postpone(request, needed)
            return
        for chunk in filter(self._primary.has, reversed(needed)):
            self._primary.touch(chunk)
        if not lookup.is_probe:
            self._pins.pin(request.record.id, needed)
        self._order_promotions(lookup, missing)

    def _usable(self, hashes: list[bytes], first: int, has: Callable[[Chunk], bool]) -> dict[Chunk, int]:
        """Returns what the longest prefix there is needs, with its index in the prefix; its beginning comes first.

        With a snapshot at its end, it is of no use but as a whole: then it is the longest one for which there are slots.
        """
        count = self._map.longest(hashes, first, has)
        needed = list(self._map.needed(hashes, first, count))
        while self._map.pieces and len(needed) > self._primary.num_slots - self._primary.write_back_slots:
            count = self._map.longest(hashes[: count - 1], first, has)
            needed = list(self._map.needed(hashes, first, count))
        return dict(sorted(needed, key=lambda each: each[1]))

    def _is_near(self, chunk: Chunk, found: set[Chunk]) -> bool:
        """Returns whether a chunk has a slot, or was `found` in a secondary tier."""
        return self._map.looked_up_as(chunk) in found or self._primary.expects(chunk)

    def _order_promotions(self, lookup: Lookup, indices: Mapping[Chunk, int]) -> None:
        """Orders as many of these chunks, with their index in the prefix, as there are slots: its beginning first."""
        coming: list[ChunkSlot] = []
        for chunk, at in indices.items():
            slot = self._primary.allocate(chunk, self._map.span(lookup.request, at))
            if slot is None:
                break
            coming.append(ChunkSlot(slot, *chunk))
        for start in range(0, len(coming), BATCH):  # they are usable as soon as they have come, however late those after them are
            lookup.await_job(self._jobs.order("promote", coming[start : start + BATCH]))

    def _await_promotions(self, lookup: Lookup, chunks: list[Chunk]) -> None:
        """Waits for those of the chunks that are being promoted for others."""
        for job in self._jobs.moving("promote", chunks):
            lookup.await_job(job)

    # ---- when to look up ----

    def _pays(self) -> bool:
        """Returns whether requests are to wait for the tiers rather than to compute; logs when that changes."""
        pays = self._policy.pays()
        if pays and self._logged_slow:
            logger.info("the secondary KV tiers are quicker than computing again: every request looks up")
            self._logged_slow = False
        elif not pays and self._slow.is_due(self._jobs.clock()):
            text = "the secondary KV tiers take longer than computing what they find; one request in %d looks up until then"
            logger.warning(text, PROBE_EVERY)
            self._logged_slow = True
        return pays

    def _probe_is_due(self) -> bool:
        """Returns whether a request that passes by looks up all the same: one at a time."""
        return self._policy.probe_is_due() and not any(each.is_probe for each in self._lookups)

    def _late(self) -> list[TransferJob]:
        """Orders that requests do not wait for any longer: the tiers hang."""
        return [job for job in self._jobs.older_than(LOOKUP_SECONDS) if job.order.kind in ("look_up", "promote")]

    # ---- lookups under way ----

    def _of(self, job: TransferJob) -> list[Lookup]:
        return [lookup for lookup in self._lookups if job.order.job in lookup.orders]

    def _end_order(self, job: TransferJob) -> None:
        """The order has been answered, or nobody waits for it any more."""
        for lookup in self._of(job):
            lookup.orders.discard(job.order.job)
            self._end_idle(lookup)

    def _end_idle(self, lookup: Lookup) -> None:
        """Ends a lookup that waits for nothing."""
        if not lookup.orders:
            self._end(lookup)

    def _end(self, lookup: Lookup) -> None:
        """Charges a lookup with its wait since the last one ended: several that wait at once share their time.

        To compute, they would have waited for each other as well.
        """
        self._lookups.remove(lookup)
        now = self._jobs.clock()
        waited, spared = now - max(lookup.began, self._last_end), len(lookup.promoted) * CHUNK
        self._last_end = now
        self._policy.ended(waited, spared, is_probe=lookup.is_probe)
        if not lookup.is_probe:
            self._budget.spared(spared * (self._costs.token or 0.0))
