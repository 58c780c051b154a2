"""What requests ask of the tiers outside: how long each waits for that, and how much less it has to compute then."""

from dataclasses import dataclass, field

from starling_engine.kv_offload.chunks import ChunkMap
from starling_engine.kv_offload.costs import Costs
from starling_engine.kv_offload.jobs import TransferJob, TransferJobs
from starling_engine.kv_offload.primary import Chunk
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.request_state import Gate, RequestState


@dataclass(slots=True, eq=False)
class Lookup:
    """Of one request, until all its orders have ended or are given up."""

    request: RequestState
    names: list[bytes]
    first: int
    """Chunks of the prefix that the device has."""
    is_probe: bool = False
    """Its request does not wait for it, and may have ended meanwhile."""
    orders: set[int] = field(default_factory=set)
    there: set[Chunk] = field(default_factory=set)
    """Those that are in slots, or come there, without being fetched."""
    came: set[Chunk] = field(default_factory=set)
    shared: float = 0.0
    """What `Lookups` had shared out when it began."""

    def await_job(self, job: TransferJob) -> None:
        self.orders.add(job.order.job)
        if not self.is_probe:
            job.park(self.request, Gate.KV_FETCH)


class Lookups:
    """Tells the costs of each that ends.

    Several share the time for which they wait together: to compute they would have waited for each other as well.
    """

    def __init__(self, chunks: ChunkMap, jobs: TransferJobs, costs: Costs) -> None:
        self._map = chunks
        self._jobs = jobs
        self._costs = costs
        self._asks: list[Lookup] = []
        self._shared = 0.0
        """Seconds that one ask would have been given which had been there from the start."""
        self._shared_at = 0.0

    @property
    def probing(self) -> bool:
        return any(ask.is_probe for ask in self._asks)

    def begin(self, ask: Lookup) -> None:
        self._share()
        ask.shared = self._shared
        self._asks.append(ask)

    def of(self, job: TransferJob) -> list[Lookup]:
        return [ask for ask in self._asks if job.order.job in ask.orders]

    def end_order(self, job: TransferJob) -> None:
        """It has been answered, or is waited for no more."""
        for ask in self.of(job):
            ask.orders.discard(job.order.job)
            self.end_idle(ask)

    def end_idle(self, ask: Lookup) -> None:
        """Ends one that waits for nothing."""
        if not ask.orders:
            self._end(ask)

    def forget(self, request: RequestState) -> None:
        """It waits no more, for whatever reason."""
        for ask in [ask for ask in self._asks if ask.request is request and not ask.is_probe]:
            self._end(ask)

    def _end(self, ask: Lookup) -> None:
        self._share()
        self._asks.remove(ask)
        wanted, spared = (len(ask.names) - ask.first) * CHUNK, self._gain(ask) * CHUNK
        self._costs.asked(self._shared - ask.shared, wanted, spared, is_probe=ask.is_probe)

    def _gain(self, ask: Lookup) -> int:
        """Chunks by which its prefix has become longer."""
        if not ask.came:
            return 0
        before = self._map.longest(ask.names, ask.first, ask.there.__contains__)
        return self._map.longest(ask.names, ask.first, (ask.there | ask.came).__contains__) - before

    def _share(self) -> None:
        now = self._jobs.now()
        if self._asks:
            self._shared += (now - self._shared_at) / len(self._asks)
        self._shared_at = now
