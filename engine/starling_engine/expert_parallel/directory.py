"""Tells ranks that load experts which ranks hold them: an entry of each in the store where the next epoch's ranks meet."""

import time
from collections.abc import Callable, Mapping

import msgspec
from torch._C._distributed_c10d import Store

from starling_engine.config import WorkerConfig
from starling_engine.expert_parallel.peers import ExpertPeer, ExpertServer, FindPeers
from starling_engine.layers.experts import Experts
from starling_engine.parallel.gloo import join_store
from starling_engine.topology.epoch import EpochPlan

WAIT_SECONDS = 1.0
"""Time for a rank that is in a long step, and learns of the next epoch when that ends."""
POLL_SECONDS = 0.01

_decode = msgspec.json.Decoder(ExpertPeer).decode


class PeerDirectory:
    """The entries of one epoch and stage, under its `name` in the store. Used by one thread, as the store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def add(self, peer: ExpertPeer) -> None:
        index = self._store.add(f"{self._name}/peers", 1) - 1
        self._store.set(f"{self._name}/peer/{index}", msgspec.json.encode(peer).decode())

    def read(self, expected: int, cancelled: Callable[[], bool]) -> list[ExpertPeer]:
        """Returns all entries when `expected` are there; after WAIT_SECONDS those that are."""
        end = time.monotonic() + WAIT_SECONDS
        while len(keys := self._keys()) < expected and time.monotonic() < end and not cancelled():
            time.sleep(POLL_SECONDS)
        return [_decode(self._store.get(key)) for key in keys]

    def _keys(self) -> list[str]:
        keys = [f"{self._name}/peer/{index}" for index in range(self._store.add(f"{self._name}/peers", 0))]
        return [key for key in keys if self._store.check([key])]


class ExpertPublisher:
    """Serves this rank's experts, and publishes them. Ranks that leave take part too: others lack what they hold."""

    def __init__(self, config: WorkerConfig, experts: Mapping[int, Experts]) -> None:
        """`experts` as `Decoder.experts`, before anything is loaded into them by another thread."""
        assert config.rendezvous is not None, "the executor sets the address of this rank"
        self._layout = config.layout
        self._stage = config.layout.coordinates(config.rank).pp
        self._server = ExpertServer(experts, config.rendezvous.address)

    @property
    def address(self) -> str:
        return self._server.address

    def publish(self, plan: EpochPlan) -> None:
        """Adds an entry with the experts that are here, if any. Raises RankLost when nobody serves the epoch's store."""
        holds = self._server.holds()
        if any(holds.values()):
            self._directory(plan).add(ExpertPeer(self.address, holds))

    def find_peers(self, plan: EpochPlan) -> FindPeers | None:
        """Returns what finds the ranks that serve before the epoch; None where there are none."""
        expected = plan.served * self._layout.tensor
        if not expected:
            return None

        def find(cancelled: Callable[[], bool]) -> list[ExpertPeer]:
            return self._directory(plan).read(expected, cancelled)

        return find

    def _directory(self, plan: EpochPlan) -> PeerDirectory:
        return PeerDirectory(join_store(plan.rendezvous), plan.stage_name(self._stage))
