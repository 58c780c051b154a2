"""Experts for other ranks: each rank sends those that it holds, as it keeps them, to ranks that are to hold them too."""

import logging
import threading
from collections.abc import Mapping

import msgspec
import zmq

from starling_engine.ipc.listening import listen
from starling_engine.layers.experts import Experts
from starling_engine.platforms.priority import lower_priority

logger = logging.getLogger("starling.parallel")

PIECE = 1 << 18
"""Bytes of an answer. Between two of them whatever else wants the interpreter gets it."""


class ReadExpert(msgspec.Struct, array_like=True):
    """Asks for PIECE bytes, or what is left, of tensor `part` of an expert, from `start` on; `layout` as in `Experts`.

    Answered by two frames: why it cannot be had, in words, or nothing; and the bytes.
    """

    layer: int
    expert: int
    part: int
    start: int
    layout: str


_decode = msgspec.msgpack.Decoder(ReadExpert).decode


class ExpertServer:
    """A thread that answers one Read after another, until `close`. It knows nothing of who asks: those ask a few at a time.

    An answer is a copy, made between a look before and one after whether the expert is here, so steps never wait for it.
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
        """The experts that are here now, by layer."""
        return {layer: tuple(sorted(each.here)) for layer, each in self._experts.items()}

    def close(self) -> None:
        self._context.term()  # ends the waiting for a message
        self._thread.join()

    def _run(self, host: str) -> None:
        lower_priority()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its threads are as nice as who makes its first socket
        socket = self._context.socket(zmq.ROUTER)
        try:
            self.address = listen(socket, host)
        except Exception as error:  # noqa: BLE001 - raised by whoever makes the server
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
            wanted = _decode(payload)
        except msgspec.DecodeError as error:
            logger.warning("a message of %d bytes was refused: %s", len(payload), error)
            return
        refusal, piece = self._read(wanted)
        socket.send_multipart([identity, refusal.encode(), piece], copy=False)

    def _read(self, wanted: ReadExpert) -> tuple[str, memoryview | bytes]:
        if wanted.layer not in self._experts:
            return f"layer {wanted.layer} is not here", b""
        if wanted.layout != self._layouts[wanted.layer]:
            return f"experts are kept as {self._layouts[wanted.layer]}, and were asked for as {wanted.layout}", b""
        try:
            piece = self._experts[wanted.layer].read(wanted.expert, wanted.part, wanted.start, wanted.start + PIECE)
        except IndexError:
            return f"an expert has no tensor {wanted.part}", b""
        if piece is None:
            return f"expert {wanted.expert} of layer {wanted.layer} is not here", b""
        self.sent += len(piece)
        return "", piece.data
