"""Experts from other ranks, copied as they lie there: nothing is read from the files, nothing converted or packed again."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
import zmq

from starling_engine.errors import EpochFailed, WeightError
from starling_engine.expert_parallel.expert_server import PIECE, ReadExpert
from starling_engine.layers.experts import Experts
from starling_engine.topology.epoch import PEERS

IN_FLIGHT = 4
"""Pieces that are asked for at once: the next is on its way while one is copied, and who sends never has many to keep."""
PATIENCE = 2.0
"""Seconds without a piece after which a rank is not asked any more. It may only be busy: the files are there too."""
LOOK_MS = 20


class ExpertPeer(msgspec.Struct, frozen=True):
    """A rank whose `ExpertServer` is at `address`, and the experts that it holds, by layer."""

    address: str
    holds: dict[int, tuple[int, ...]]


FindPeers = Callable[[Callable[[], bool]], Sequence[ExpertPeer]]
"""Those that are there; may wait a little for them, as long as its argument does not say that all was cancelled."""


class PeerExperts:
    """An ExpertSource. Used by one thread; `close` ends its connections."""

    name = PEERS

    def __init__(self, find: FindPeers) -> None:
        self._find = find
        self._peers: list[ExpertPeer] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def has(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> bool:
        return bool(self._holders(layer, expert, cancelled))

    def fill(self, experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises WeightError where the rank that was asked does not send it; it is not asked again, nor for another one."""
        holders = self._holders(layer, expert, cancelled)
        peer = holders[(layer + expert) % len(holders)]  # all have to send something
        try:
            self._copy(self._socket(peer), experts, layer, expert, cancelled)
        except WeightError as error:
            self._forget(peer)
            raise WeightError(f"the rank at {peer.address}: {error}") from error
        experts.arrive(expert)

    def close(self) -> None:
        self._context.destroy(0)

    def _holders(self, layer: int, expert: int, cancelled: Callable[[], bool]) -> list[ExpertPeer]:
        if self._peers is None:
            self._peers = list(self._find(cancelled))
        return [peer for peer in self._peers if expert in peer.holds.get(layer, ())]

    def _copy(self, socket: zmq.Socket[bytes], experts: Experts, layer: int, expert: int, cancelled: Callable[[], bool]) -> None:
        """Raises WeightError, and EpochFailed when it is cancelled. Answers come in the order in which they were asked for."""
        places, layout = experts.place(expert), experts.layout
        wanted = [(part, start) for part, place in enumerate(places) for start in range(0, len(place), PIECE)]
        asked: deque[torch.Tensor] = deque()
        for part, start in wanted:
            if len(asked) == IN_FLIGHT:
                _take_piece(socket, asked.popleft(), cancelled)
            socket.send(self._encode(ReadExpert(layer, expert, part, start, layout)))
            asked.append(places[part][start : start + PIECE])
        for place in asked:
            _take_piece(socket, place, cancelled)

    def _socket(self, peer: ExpertPeer) -> zmq.Socket[bytes]:
        if peer.address not in self._sockets:
            socket = self._sockets[peer.address] = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IPV6, "[" in peer.address)
            socket.connect(peer.address)
        return self._sockets[peer.address]

    def _forget(self, peer: ExpertPeer) -> None:
        """Answers that come too late go nowhere."""
        assert self._peers is not None
        self._peers.remove(peer)
        self._sockets.pop(peer.address).close(0)


def _take_piece(socket: zmq.Socket[bytes], place: torch.Tensor, cancelled: Callable[[], bool]) -> None:
    since = time.monotonic()
    while True:
        if cancelled():
            raise EpochFailed("cancelled")
        if socket.poll(LOOK_MS):
            break
        if time.monotonic() - since > PATIENCE:
            raise WeightError(f"nothing came for {PATIENCE:g} s")
    refusal, piece = socket.recv_multipart(copy=False)
    if len(refusal.buffer):
        raise WeightError(bytes(refusal.buffer).decode())
    if len(piece.buffer) != len(place):
        raise WeightError(f"{len(piece.buffer)} bytes came where {len(place)} were asked for")
    place.copy_(torch.from_numpy(np.frombuffer(piece.buffer, np.uint8)))
