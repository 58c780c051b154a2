"""Orders to move chunks, and their answers, between an executor and a worker process, beside the plans."""

import threading

import msgspec
import zmq

from starling_engine.kv_offload.orders import TierStatus, TransferDone
from starling_engine.kv_offload.transfers import TransferThreads
from starling_engine.worker.messages import TransferChunks, transfer_identity
from starling_engine.worker.process.dealer import connect

_decode = msgspec.msgpack.Decoder(TransferChunks).decode


class MoveSocket:
    """A thread with a socket of its own: while a step runs, nobody reads the one that plans come by."""

    def __init__(self, address: str, rank: int) -> None:
        context = zmq.Context()
        self._socket = connect(context, address, transfer_identity(rank))
        self._inside = context.socket(zmq.PULL)
        self._inside.bind("inproc://done")
        self._answers = context.socket(zmq.PUSH)
        self._answers.connect("inproc://done")
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode

    def answer(self, message: TransferDone | TierStatus) -> None:
        """From any thread."""
        with self._lock:
            self._answers.send(self._encode(message))

    def serve(self, transfers: TransferThreads) -> None:
        """Passes orders on from now on, and says so to the executor."""
        threading.Thread(target=self._run, args=(transfers,), name="kv-moves", daemon=True).start()

    def _run(self, transfers: TransferThreads) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inside, zmq.POLLIN)
        self._socket.send(self._encode(TransferChunks([])))
        while True:
            ready = dict(poller.poll())
            if self._inside in ready:
                self._socket.send(self._inside.recv())
            if self._socket in ready:
                for order in _decode(self._socket.recv()).orders:
                    transfers.order(order)
