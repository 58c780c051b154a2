"""Copies experts from rank to rank, as they lie in memory: no file is read, nothing is converted or packed again.

`ExpertServer` sends the experts that a rank holds. `PeerSource` asks for them, a few pieces at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch
import zmq

from starling_engine.errors import EpochFailed, WeightError
from starling_engine.ipc.listening import listen
from starling_engine.layers.experts import Experts
from starling_engine.platforms.priority import lower_priority
from starling_engine.topology.epoch import PEERS

logger = logging.getLogger("starling.parallel")

PIECE = 1 << 18
"""Bytes of an answer. Between two of them other threads get the interpreter."""
IN_FLIGHT = 4
"""Pieces that are requested at once. The next is on its way while one is copied, and a server never has many to hold."""
PIECE_TIMEOUT = 2.0
"""Seconds without a piece after which a rank is given up. It may only be busy, but the files are there too."""
POLL_MS = 20


class ReadExpert(msgspec.Struct, array_like=True):
    """Requests PIECE bytes, or what is left, of tensor `part` of an expert, from `start` on; `layout` as in `Experts`.

    The answer has two frames: a reason why it cannot be had, or nothing; and the bytes.
    """

    layer: int
    expert: int
    part: int
    start: int
    layout: str


_decode = msgspec.msgpack.Decoder(ReadExpert).decode


class ExpertServer:
    """A thread that answers one `ReadExpert` after another, until `close`. It knows nothing of the ranks that ask.

    An answer is a copy. The server checks before and after it that the expert is here, so steps never wait for it.
    """

    def __init__(self, experts: Mapping[int, Experts], host: str) -> None:
        """`experts` as `Decoder.experts`, before any other thread loads into them. Listens on a free port of `host`."""
        self.sent = 0
        """Bytes."""
        self._experts = experts
        self._layouts = {layer: each.layout for layer, each in experts.items()}
        self._listening = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(host,), name="expert-server", daemon=True)
        self._thread.start()
        self._listening.wait()
        if self._failed is not None:
            raise self._failed

    def holds(self) -> dict[int, tuple[int, ...]]:
        """Returns the experts that are here now, by layer."""
        return {layer: tuple(sorted(each.loaded)) for layer, each in self._experts.items()}

    def close(self) -> None:
        self._context.term()  # ends the wait for a message
        self._thread.join()

    def _run(self, host: str) -> None:
        lower_priority()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its threads take the priority of its first socket's thread
        socket = self._context.socket(zmq.ROUTER)
        try:
            self.address = listen(socket, host)
        except Exception as error:  # noqa: BLE001 - raised in the thread that makes the server
            self._failed = error
            self._context.destroy(0)
            return
        finally:
            self._listening.set()
        try:
            while True:
                identity, *payload = socket.recv_multipart()
                self._answer(socket, identity, b"".join(payload))
        except zmq.ContextTerminated:
            socket.close(0)

    def _answer(self, socket: zmq.Socket[bytes], identity: bytes, payload: bytes) -> None:
        try:
            request = _decode(payload)
        except msgspec.DecodeError as error:
            logger.warning("a message of %d bytes was refused: %s", len(payload), error)
            return
        refusal, piece = self._read(request)
        socket.send_multipart([identity, refusal.encode(), piece], copy=False)

    def _read(self, request: ReadExpert) -> tuple[str, memoryview | bytes]:
        layer, expert = request.layer, request.expert
        if layer not in self._experts:
            return f"layer {layer} is not here", b""
        if request.layout != self._layouts[layer]:
            return f"experts are kept as {self._layouts[layer]}, and were asked for as {request.layout}", b""
        try:
            piece = self._experts[layer].read(expert, request.part, request.start, request.start + PIECE)
        except IndexError:
            return f"an expert has no tensor {request.part}", b""
        if piece is None:
            return f"expert {expert} of layer {layer} is not here", b""
        self.sent += len(piece)
        return "", piece.data


class ExpertPeer(msgspec.Struct, frozen=True):
    """A rank whose `ExpertServer` is at `address`, and the experts that it holds, by layer."""

    address: str
    holds: dict[int, tuple[int, ...]]


FindPeers = Callable[[Callable[[], bool]], Sequence[ExpertPeer]]
"""Returns the peers that are known. May wait a little for them, until its argument says that the load was cancelled."""


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
