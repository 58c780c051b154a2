"""Ranks on other nodes than their executor: no children of it, so it depends on their heartbeats. Imports no torch."""

import time
from collections.abc import Mapping

import zmq

from starling_engine.errors import RankLost
from starling_engine.worker.counters import ProgressCount
from starling_engine.worker.messages import heartbeat_identity


class RemoteRanks:
    """`socket` is the executor's ROUTER. A rank is lost when its connection ends, or it sends nothing for `patience` seconds."""

    def __init__(self, socket: "zmq.Socket[bytes]", ranks: range, patience: float) -> None:
        self.ranks = ranks
        self._socket = socket
        self._patience = patience
        self._hosts: dict[int, str] = {}
        self._counts: dict[int, ProgressCount] = {}
        self._last_heartbeat: dict[int, float] = {}

    @property
    def counts(self) -> Mapping[int, ProgressCount]:
        """Progress of the ranks that have sent a heartbeat."""
        return self._counts

    def host(self, rank: int) -> str:
        return self._hosts[rank]

    def join(self, rank: int, host: str) -> None:
        self._hosts[rank] = host

    def on_heartbeat(self, rank: int, count: ProgressCount) -> None:
        self._counts[rank] = count
        self._last_heartbeat[rank] = time.monotonic()

    def check(self) -> None:
        """Raises RankLost, naming the rank and its node."""
        now = time.monotonic()
        for rank, last in self._last_heartbeat.items():
            name = f"rank {rank} on {self._hosts.get(rank, 'another node')}"
            if not self._is_connected(rank):
                raise RankLost(f"{name} is gone: its connection ended")
            if now - last > self._patience:
                raise RankLost(f"{name} has not been heard of for {self._patience:g} s")

    def _is_connected(self, rank: int) -> bool:
        """Probes the connection: a ROUTER says at once when nobody of that name is there."""
        try:
            self._socket.send_multipart((heartbeat_identity(rank), b""), zmq.DONTWAIT)
        except zmq.Again:
            return True  # it reads nothing now; silence will show
        except zmq.ZMQError:
            return False
        return True
