"""Frontends that follow what a core has cached."""

from collections.abc import Sequence

from starling_engine.core.messages import CacheNotice, FrontendCall, Outbox
from starling_engine.kv.changes import FollowedGroups, cached_now, changes_of
from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from starling_engine.kv.manager import KVManager
from starling_engine.kv_offload.base import OffloadManager


class Followers:
    """Tells each frontend all that is cached when it begins to follow, and then what changes.

    Without any of them the log of events is closed, and what is cached is written down nowhere else.
    """

    def __init__(self, kv: KVManager, offload: OffloadManager, outbox: Outbox) -> None:
        self._kv, self._offload, self._outbox = kv, offload, outbox
        self._followed = FollowedGroups(len(kv.groups), has_state=bool(kv.state_blocks))
        self._frontends = set[bytes]()

    def add(self, caller: FrontendCall) -> None:
        """Tells a listener of a frontend all; it is told once more where it listens already. The log's events have been taken."""
        device, host = [*self._kv.cached()], self._offload.publish(self._kv.events)
        self._kv.events.open(device, host)
        self._frontends.add(caller.frontend)
        for changes in cached_now(self._followed, {"GPU": device, "CPU": host}):
            self._outbox.send(caller.frontend, CacheNotice(changes, caller.call))

    def publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Tells all what events have changed."""
        if not self._frontends:
            return
        for changes in changes_of(self._followed, events):
            for frontend in self._frontends:
                self._outbox.send(frontend, CacheNotice(changes))

    def remove(self, frontend: bytes) -> None:
        """Tells a frontend nothing any more, if it was told anything."""
        self._frontends.discard(frontend)
        if not self._frontends and not self._kv.events.published:
            self._kv.events.close()
            self._offload.publish(None)
