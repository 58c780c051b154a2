"""Transfers of chunks: their commands and replies between an executor and a worker process, beside the plans."""

import threading
from collections.abc import Callable, Sequence

import msgspec
import zmq

from starling_engine.kv_offload.orders import TierStatus, TransferChunks, TransferDone, TransferOrder
from starling_engine.worker.messages import TransfersReady, transfer_identity
from starling_engine.worker.process.executor_socket import connect

_decode = msgspec.msgpack.Decoder(TransferChunks).decode
REPLIES = "inproc://replies"


class TransferSocket:
    """A thread with a socket of its own: while a step runs, nobody reads the one for plans."""

    def __init__(self, address: str, rank: int) -> None:
        context = zmq.Context()
        self._socket = connect(context, address, transfer_identity(rank))
        self._replies = context.socket(zmq.PULL)
        self._replies.bind(REPLIES)
        self._reply_socket = context.socket(zmq.PUSH)
        self._reply_socket.connect(REPLIES)
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode

    def reply(self, message: TransferDone | TierStatus) -> None:
        """Sends a reply. From any thread."""
        with self._lock:
            self._reply_socket.send(self._encode(message))

    def serve(self, transfer: Callable[[Sequence[TransferOrder]], None]) -> None:
        """Has orders carried out by `transfer` from now on, and reports so to the executor."""
        threading.Thread(target=self._run, args=(transfer,), name="kv-transfers", daemon=True).start()

    def _run(self, transfer: Callable[[Sequence[TransferOrder]], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._replies, zmq.POLLIN)
        self._socket.send(self._encode(TransfersReady()))
        while True:
            ready = dict(poller.poll())
            if self._replies in ready:
                self._socket.send(self._replies.recv())
            if self._socket in ready:
                transfer(_decode(self._socket.recv()).orders)
