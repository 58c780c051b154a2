"""Health of a core's ranks: which have ended, which stand still, which are no longer reached. Imports no torch."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping

import zmq

from starling_engine import errors
from starling_engine.errors import PeerLost, RankLost, StarlingError
from starling_engine.topology.layout import ParallelLayout
from starling_engine.worker.counters import ProgressCount, ProgressCounters
from starling_engine.worker.messages import heartbeat_identity

LAST_WORD_SECONDS = 2.0
"""Time that the last message of a process which has ended may need to come."""
LOOK_SECONDS = 0.05
LONGEST_LOOK = 1.0
"""Seconds between two looks that count; health is looked at several times a second."""


class AwakeClock:
    """A clock of the time in which this process looked, for the patience with others.

    A process that was held up must not mistake that for their silence: on a machine that stood still, so did they.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._looked = time.monotonic()

    def __call__(self) -> float:
        """Returns seconds that only count up."""
        now = time.monotonic()
        self._now += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self._now


class RemoteRanks:
    """Ranks on other nodes than their executor: no children of it, so it depends on their heartbeats.

    `socket` is the executor's ROUTER. A rank is lost when its connection ends, or it sends nothing for `patience` seconds.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", ranks: range, patience: float) -> None:
        self.ranks = ranks
        self._socket = socket
        self._patience = patience
        self._clock = AwakeClock()
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
        self._last_heartbeat[rank] = self._clock()

    def check(self) -> None:
        """Raises RankLost, naming the rank and its node."""
        now = self._clock()
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


class ExecutorHealth:
    """Watches processes and progress. `limit` is how long, in seconds, all ranks may stand still while they have something to do.

    `receive` handles what ranks have sent, and waits for it at most the given seconds. With `dp_sync`, ranks also wait for those of
    other cores.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        counters: ProgressCounters,
        remote: RemoteRanks,
        limit: float,
        receive: Callable[[float], None],
        *,
        dp_sync: bool,
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        """Ranks of this node."""
        self._layout = layout
        self._counters = counters
        self._remote = remote
        self._limit = limit
        self._receive = receive
        self._dp_sync = dp_sync
        self._gave_up: set[int] = set()
        """Ranks that ended because they missed another."""
        self._clock = AwakeClock()
        self._seen: tuple[list[ProgressCount], float] = ([], self._clock())

    def counts(self) -> list[ProgressCount]:
        """Returns the progress of each rank; of a rank on another node as its last heartbeat had it."""
        local, remote = self._counters.read(), self._remote.counts
        return [remote.get(rank, count) for rank, count in enumerate(local)]

    def begin(self) -> None:
        """Starts the clock: ranks that had nothing to do get something."""
        self._seen = (self.counts(), self._clock())

    def failure(self, rank: int, kind: str, text: str) -> StarlingError:
        """Returns the error for a rank's last message. A rank that lost another may not know which; processes may show it."""
        if kind in (RankLost.__name__, PeerLost.__name__):
            self._gave_up.add(rank)
            self.check_alive(patience=1.0)
            if self._dp_sync:
                return PeerLost(text) if kind == PeerLost.__name__ else RankLost(text)
            return RankLost(f"{self._behind()} is gone or stuck: {text}")
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, StarlingError):
            return known(text)
        return RankLost(f"rank {rank} failed: {kind}: {text}")

    def check_alive(self, patience: float = 0.0) -> None:
        """Raises RankLost naming the process that ended, first one that a signal ended; waits up to `patience` seconds for one."""
        end = time.monotonic() + patience
        while True:
            codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll()) is not None}
            for rank, code in sorted(codes.items(), key=lambda item: item[1]):
                if rank in self._gave_up:
                    continue
                if code > 0:  # it says why before it ends, and may have said so just now
                    self._receive(LAST_WORD_SECONDS)
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                raise RankLost(f"rank {rank} (process {self.processes[rank].pid}) {how}")
            self._remote.check()
            if time.monotonic() >= end:
                return
            time.sleep(LOOK_SECONDS)

    def check_progress(self, *, stepping: bool, awaiting: bool) -> None:
        """Raises RankLost where nothing moves though steps are in flight, or a reply is awaited."""
        counts = self.counts()
        now, (last, since) = self._clock(), self._seen
        if stepping:  # progress beside a step does not count
            moved = any((new.steps, new.ticks) != (old.steps, old.ticks) for new, old in zip(counts, last, strict=True))
        else:
            moved = counts != last or not awaiting
        if moved:
            self._seen = (counts, now)
        elif now - since > self._limit:
            raise RankLost(f"{self._behind()} made no progress for {self._limit:g} s")

    def _behind(self) -> str:
        """Names the ranks that the others wait for: at the earliest step, in its earliest stage, with the fewest ticks."""
        counts, coordinates = self.counts(), self._layout.coordinates
        progress = [(count.steps, coordinates(rank).pp, count.ticks) for rank, count in enumerate(counts)]
        return " and ".join(f"rank {rank}" for rank, each in enumerate(progress) if each == min(progress))
