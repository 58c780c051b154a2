"""Sources that a rank loads experts from: the checkpoint, or other ranks (`peers.py`), whichever proves faster."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import torch
import zmq

from starling_engine.errors import EpochFailed, WeightError
from starling_engine.expert_parallel.peers import PIECE, ExpertPeer, FindPeers, ReadExpert
from starling_engine.layers.experts import Experts
from starling_engine.topology.epoch import CHECKPOINT, PEERS, ExpertLoads
from starling_engine.weights.weight_slot import WeightSource

logger = logging.getLogger("starling.parallel")

PROBES = 2
"""Experts that come from each source before one is chosen. Later, a source's speed is that of its last PROBES experts."""
IN_FLIGHT = 4
"""Pieces that are requested at once. The next is on its way while one is copied, and a server never has many to hold."""
PIECE_TIMEOUT = 2.0
"""Seconds without a piece after which a rank is given up. It may only be busy, but the files are there too."""
POLL_MS = 20


class ExpertSource(Protocol):
    """Loads experts into their slots. Used by one thread."""

    name: str

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        """Returns whether the source may have the expert."""
        ...

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Loads an expert into the slot that `experts` has reserved for it, or into a free one.

        Raises WeightError where this source cannot, ConfigError where there is no slot, EpochFailed when it is cancelled.
        """
        ...

    def close(self) -> None: ...


class CheckpointSource:
    """An ExpertSource that reads the files, as the model's start does."""

    name = CHECKPOINT

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def has(self, _layer: int, _expert: int, _cancelled: Callable[[], bool]) -> bool:
        return True

    def fill(self, experts: Experts, _layer: int, expert: int, _cancelled: Callable[[], bool]) -> None:
        self._source.fill(experts.reserve(expert))

    def close(self) -> None:
        """Does nothing: files are open only while an expert is read."""


class PeerSource:
    """An ExpertSource that copies from other ranks. Used by one thread; `close` ends its connections."""

    name = PEERS

    def __init__(self, find: FindPeers) -> None:
        self._find = find
        self._peers: list[ExpertPeer] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        return bool(self._peers_with(layer, expert, cancelled))

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises WeightError where the chosen rank does not send it. That rank is not used again, for any expert."""
        peers = self._peers_with(layer, expert, cancelled)
        peer = peers[(layer + expert) % len(peers)]  # so that all of them have something to send
        try:
            self._copy(self._socket(peer), experts, layer, expert, cancelled)
        except WeightError as error:
            self._forget(peer)
            raise WeightError(f"the rank at {peer.address}: {error}") from error
        experts.mark_loaded(expert)

    def close(self) -> None:
        self._context.destroy(0)

    def _peers_with(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> list[ExpertPeer]:
        if self._peers is None:
            self._peers = list(self._find(cancelled))
        return [peer for peer in self._peers if expert in peer.holds.get(layer, ())]

    def _copy(self, socket: zmq.Socket[bytes], experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises WeightError, and EpochFailed when it is cancelled. Answers come in the order of the requests."""
        parts, layout = experts.reserve_memory(expert), experts.layout
        wanted = [(part, start) for part, memory in enumerate(parts) for start in range(0, len(memory), PIECE)]
        requested: deque[torch.Tensor] = deque()
        for part, start in wanted:
            if len(requested) == IN_FLIGHT:
                _receive_piece(socket, requested.popleft(), cancelled)
            socket.send(self._encode(ReadExpert(layer, expert, part, start, layout)))
            requested.append(parts[part][start : start + PIECE])
        for memory in requested:
            _receive_piece(socket, memory, cancelled)

    def _socket(self, peer: ExpertPeer) -> zmq.Socket[bytes]:
        if peer.address not in self._sockets:
            socket = self._sockets[peer.address] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IPV6, "[" in peer.address)
            socket.connect(peer.address)
        return self._sockets[peer.address]

    def _forget(self, peer: ExpertPeer) -> None:
        """Drops its connection as well, and with it answers that come too late."""
        assert self._peers is not None
        self._peers.remove(peer)
        self._sockets.pop(peer.address).close(0)


@dataclass(slots=True)
class SourceSpeeds:
    """Speeds of sources, by name: bytes a second for each of the last experts, 0 for one that did not come."""

    rates: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=PROBES)))
    preferred: str = ""

    def best(self, name: str) -> float:
        """Returns the best of the last speeds: one slow expert does not make a source slow."""
        return max(self.rates[name], default=0.0)

    def is_measured(self, name: str) -> bool:
        return len(self.rates[name]) == PROBES or 0.0 in self.rates[name]


class FastestSource:
    """An ExpertSource of several. The first experts come from each in turn, the others from the one that was faster lately.

    An expert that one source cannot load comes from another, which is preferred from then on.
    """

    name = "the fastest"

    def __init__(self, sources: Sequence[ExpertSource], speeds: SourceSpeeds | None = None) -> None:
        """`speeds`: what earlier loads measured."""
        self.loaded = {source.name: ExpertLoads() for source in sources}
        """Experts that came from each source, by its name."""
        self._sources = sources
        self._speeds = speeds or SourceSpeeds()

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        return any(source.has(layer, expert, cancelled) for source in self._sources)

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises what the last source raised, when all of them fail."""
        able = [source for source in self._sources if source.has(layer, expert, cancelled)]
        order = sorted(able, key=lambda source: self._rank(source.name))
        self._log_choice(order)
        for source in order[:-1]:
            try:
                return self._measure(source, experts, layer, expert, cancelled)
            except WeightError as error:
                logger.warning("expert %d of layer %d does not come from %s: %s", expert, layer, source.name, error)
        return self._measure(order[-1], experts, layer, expert, cancelled)

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _rank(self, name: str) -> tuple[int, float]:
        """Sorts sources: those that are not measured yet come first, then the fastest."""
        if self._speeds.is_measured(name):
            return PROBES, -self._speeds.best(name)
        return len(self._speeds.rates[name]), 0.0

    def _measure(self, source: ExpertSource, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        began = time.monotonic()
        try:
            source.fill(experts, layer, expert, cancelled)
        except WeightError:
            self._speeds.rates[source.name].clear()
            self._speeds.rates[source.name].append(0.0)
            raise
        got = ExpertLoads(1, experts.bytes_each, time.monotonic() - began)
        self.loaded[source.name].add(got)
        self._speeds.rates[source.name].append(got.rate)

    def _log_choice(self, order: list[ExpertSource]) -> None:
        speeds, chosen = self._speeds, order[0].name
        if len(order) < 2 or chosen == speeds.preferred or not speeds.is_measured(chosen):
            return
        speeds.preferred = chosen
        rates = ", ".join(f"{name} {speeds.best(name) / 1e6:.0f} MB/s" for name in speeds.rates)
        logger.info("experts come from %s (%s)", chosen, rates)


def _receive_piece(socket: zmq.Socket[bytes], memory: torch.Tensor, cancelled: Callable[[], bool]) -> None:
    since = time.monotonic()
    while True:
        if cancelled():
            raise EpochFailed("cancelled")
        if socket.poll(POLL_MS):
            break
        if time.monotonic() - since > PIECE_TIMEOUT:
            raise WeightError(f"nothing came for {PIECE_TIMEOUT:g} s")
    refusal, piece = socket.recv_multipart(copy=False)
    if len(refusal.buffer):
        raise WeightError(bytes(refusal.buffer).decode())
    if len(piece.buffer) != len(memory):
        raise WeightError(f"{len(piece.buffer)} bytes came where {len(memory)} were asked for")
    memory.copy_(torch.from_numpy(np.frombuffer(piece.buffer, np.uint8)))
