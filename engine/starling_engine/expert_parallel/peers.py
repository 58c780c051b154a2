"""Ranks that hold experts send them to ranks that load them, as they lie in memory: nothing is read from files or packed again.

`ExpertServer` sends them, and `PeerSource` in `sources.py` asks for them. Which ranks hold which stands in the store where the next
epoch's ranks meet.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
from torch._C._distributed_c10d import Store

from starling_engine.config import WorkerConfig
from starling_engine.ipc.listening import listen
from starling_engine.ipc.priority import lower_priority
from starling_engine.layers.experts import Experts
from starling_engine.parallel.gloo import join_store
from starling_engine.topology.epoch import EpochPlan

logger = logging.getLogger("starling.parallel")

PIECE = 1 << 18
"""Bytes of an answer. Between two of them other threads get the interpreter."""
WAIT_SECONDS = 1.0
"""Time for a rank that is in a long step, and learns of the next epoch when that ends."""
POLL_SECONDS = 0.01


class ReadExpert(msgspec.Struct, array_like=True):
    """Requests PIECE bytes, or what is left, of tensor `part` of an expert, from `start` on; `layout` as in `Experts`.

    The answer has two frames: a reason why it cannot be had, or nothing; and the bytes.
    """

    layer: int
    expert: int
    part: int
    start: int
    layout: str


_decode_request = msgspec.msgpack.Decoder(ReadExpert).decode


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
            request = _decode_request(payload)
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

_decode_peer = msgspec.json.Decoder(ExpertPeer).decode


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
        return [_decode_peer(self._store.get(key)) for key in keys]

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

    def publish(self, epoch_plan: EpochPlan) -> None:
        """Adds an entry with the experts that are here, if any. Raises RankLost when nobody serves the epoch's store."""
        holds = self._server.holds()
        if any(holds.values()):
            self._directory(epoch_plan).add(ExpertPeer(self.address, holds))

    def find_peers(self, epoch_plan: EpochPlan) -> FindPeers | None:
        """Returns what finds the ranks that serve before the epoch; None where there are none."""
        expected = epoch_plan.served * self._layout.tensor
        if not expected:
            return None

        def find(cancelled: Callable[[], bool]) -> list[ExpertPeer]:
            return self._directory(epoch_plan).read(expected, cancelled)

        return find

    def _directory(self, epoch_plan: EpochPlan) -> PeerDirectory:
        return PeerDirectory(join_store(epoch_plan.rendezvous), epoch_plan.stage_name(self._stage))
