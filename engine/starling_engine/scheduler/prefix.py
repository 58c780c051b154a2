"""Finds the blocks that a request starts with: its parent's, or those of its prefix on the device and in the CPU tier."""

from collections.abc import Mapping
from dataclasses import dataclass

from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.base import OffloadManager
from starling_engine.request_state import RequestState, RequestStatus


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix: `hit` tokens in the blocks of `tables` ([group][logical block], no reference taken), and `external` ones to load.

    A forked prefix is shared with a request that still writes to its last block.
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
    """Looks prefixes up everywhere; a fork finds its parent in `requests`."""

    def __init__(self, kv: KVManager, offload: OffloadManager, requests: Mapping[str, RequestState]) -> None:
        self._kv = kv
        self._offload = offload
        self._requests = requests

    def find(self, request: RequestState) -> PrefixHit | None:
        """Returns None for a request that has to wait for the tiers."""
        forked = self._fork_tables(request)
        if forked is not None:
            return PrefixHit(forked, len(request.tokens) - 1, forked=True)
        if self._offload.must_wait(request):
            return None
        if not request.reads_prefix_cache:
            return PrefixHit([[] for _ in self._kv.groups], 0)
        found = self._kv.find_prefix(request.blocks, request.tokens)
        hit = found.length * self._kv.block_size
        length = self._offload.lookup(request, found.length)
        if length is None:
            return None
        return PrefixHit(self._kv.trim(found.tables, length), hit, length - hit) if length else PrefixHit(found.tables, hit)

    def parent(self, request: RequestState) -> RequestState | None:
        """Returns the request that it is a fork of, while that lives."""
        return self._requests.get(request.record.fork_of) if request.record.fork_of else None

    def _fork_tables(self, request: RequestState) -> list[list[int]] | None:
        """Returns the parent's blocks for all tokens but the last, if the parent still has them and this is a plain first start."""
        parent = self.parent(request)
        if parent is None or not request.reads_prefix_cache or parent.computed < len(request.tokens) - 1:
            return None
        if parent.status is not RequestStatus.RUNNING or parent.gates or request.tokens != parent.tokens[: len(request.tokens)]:
            return None
        return self._kv.fork_tables(parent.blocks, len(request.tokens) - 1)
