"""How ranks that are to hold experts hear of those that hold them, before they all meet."""

import time
from collections.abc import Callable

import msgspec
from torch._C._distributed_c10d import Store

from starling_engine.expert_parallel.expert_peers import ExpertPeer

WAIT_SECONDS = 1.0
"""For a rank that is in a long step, and hears of the next epoch when it ends."""
LOOK_SECONDS = 0.01

_decode = msgspec.json.Decoder(ExpertPeer).decode


class ExpertNotices:
    """In the store at which an epoch's ranks meet, under its `name`. Used by one thread, as the store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def post(self, peer: ExpertPeer) -> None:
        index = self._store.add(f"{self._name}/holders", 1) - 1
        self._store.set(f"{self._name}/holder/{index}", msgspec.json.encode(peer).decode())

    def read(self, expected: int, cancelled: Callable[[], bool]) -> list[ExpertPeer]:
        """All when `expected` are there; after WAIT_SECONDS those that are."""
        end = time.monotonic() + WAIT_SECONDS
        while len(there := self._there()) < expected and time.monotonic() < end and not cancelled():
            time.sleep(LOOK_SECONDS)
        return [_decode(self._store.get(key)) for key in there]

    def _there(self) -> list[str]:
        keys = [f"{self._name}/holder/{index}" for index in range(self._store.add(f"{self._name}/holders", 0))]
        return [key for key in keys if self._store.check([key])]
