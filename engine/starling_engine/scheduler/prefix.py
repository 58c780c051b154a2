"""What a request starts with: its parent's blocks, or what the device and the CPU tier have of its prefix."""

from collections.abc import Mapping
from dataclasses import dataclass

from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.manager import OffloadManager
from starling_engine.kv_offload.secondary.base import CHUNK
from starling_engine.request_state import RequestState, RequestStatus


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Of its tokens, `hit` lie in the blocks of `tables` ([group][logical block], no reference taken); `external` more are to be
    loaded from slots. A forked one is shared with a request that goes on writing to its last block.
    """

    tables: list[list[int]]
    hit: int
    external: int = 0
    forked: bool = False

    @property
    def length(self) -> int:
        """Tokens."""
        return self.hit + self.external


class PrefixLookup:
    """Looks in all places; `requests` are those in which a fork finds its parent."""

    def __init__(self, kv: KVManager, offload: OffloadManager | None, requests: Mapping[str, RequestState]) -> None:
        self._kv = kv
        self._offload = offload
        self._requests = requests

    def find(self, request: RequestState) -> PrefixHit | None:
        """None for a request that is to wait, for what comes from the tiers."""
        forked = self._fork_tables(request)
        if forked is not None:
            return PrefixHit(forked, len(request.tokens) - 1, forked=True)
        if self._offload is not None and self._offload.fetches.pass_over(request):
            return None
        if not request.reads_prefix_cache:
            return PrefixHit([[] for _ in self._kv.groups], 0)
        tables = self._kv.find_prefix(request.holding, request.tokens)
        hit = len(tables[0]) * self._kv.block_size
        if self._offload is None:
            return PrefixHit(tables, hit)
        chunks = self._offload.loads.match(request, len(tables[0]))
        if not chunks:
            return PrefixHit(tables, hit)
        if self._offload.loads.awaits_others(request, len(tables[0]), chunks):
            return None
        return PrefixHit(self._kv.trim(tables, chunks * CHUNK), hit, chunks * CHUNK - hit)

    def parent(self, request: RequestState) -> RequestState | None:
        """The request of which it is a fork, while that lives."""
        return self._requests.get(request.record.fork_of) if request.record.fork_of else None

    def _fork_tables(self, request: RequestState) -> list[list[int]] | None:
        """The parent's blocks for all tokens but the last, if the parent still has them and this is a plain first start."""
        parent = self.parent(request)
        if parent is None or not request.reads_prefix_cache or parent.computed < len(request.tokens) - 1:
            return None
        if parent.status is not RequestStatus.RUNNING or parent.gates or request.tokens != parent.tokens[: len(request.tokens)]:
            return None
        return self._kv.fork_tables(parent.holding, len(request.tokens) - 1)
