"""Ranks on other nodes than their executor: they are no children of it, so it goes by what they say. Imports no torch."""

import time
from collections.abc import Mapping

import zmq

from starling_engine.errors import RankLost
from starling_engine.worker.counters import ProgressCount
from starling_engine.worker.messages import Heartbeat, heartbeat_identity


class RemoteRanks:
    """`socket` is the executor's ROUTER. A rank whose connection ends is lost, and one that says nothing for `patience` seconds."""

    def __init__(self, socket: "zmq.Socket[bytes]", ranks: range, patience: float) -> None:
        self.ranks = ranks
        self._socket = socket
        self._patience = patience
        self._hosts: dict[int, str] = {}
        self._counts: dict[int, ProgressCount] = {}
        self._heard: dict[int, float] = {}

    @property
    def counts(self) -> Mapping[int, ProgressCount]:
        """Of those that have spoken."""
        return self._counts

    def host(self, rank: int) -> str:
        return self._hosts[rank]

    def join(self, rank: int, host: str) -> None:
        self._hosts[rank] = host

    def take(self, rank: int, beat: Heartbeat) -> None:
        self._counts[rank] = beat.count
        self._heard[rank] = time.monotonic()

    def check(self) -> None:
        """Raises RankLost, naming the rank and its node."""
        now = time.monotonic()
        for rank, heard in self._heard.items():
            where = f"rank {rank} on {self._hosts.get(rank, 'another node')}"
            if not self._is_connected(rank):
                raise RankLost(f"{where} is gone: its connection ended")
            if now - heard > self._patience:
                raise RankLost(f"{where} has not been heard of for {self._patience:g} s")

    def _is_connected(self, rank: int) -> bool:
        """A ROUTER says at once when nobody of that name is there."""
        try:
            self._socket.send_multipart((heartbeat_identity(rank), b""), zmq.DONTWAIT)
        except zmq.Again:
            return True  # it reads nothing now; silence will tell
        except zmq.ZMQError:
            return False
        return True
