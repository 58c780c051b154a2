"""A worker's connections to its executor, one for each thread that sends. The threads for heartbeats and transfers are here."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from starling_engine.kv_offload.orders import TierStatus, TransferChunks, TransferDone, TransferOrder
from starling_engine.step import StepMasks
from starling_engine.worker.counters import ProgressCount
from starling_engine.worker.messages import (
    HEARTBEAT_SECONDS,
    Heartbeat,
    PlanMessage,
    ToReadyWorker,
    TransfersReady,
    heartbeat_identity,
    transfer_identity,
)

CONNECTION_TIMEOUT_MS = 10_000
"""Silence after which ZeroMQ ends a connection: a machine whose power is cut does not close its own."""
REPLIES = "inproc://replies"
logger = logging.getLogger("starling.worker")


def executor_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, linger_ms: int = 0
) -> "zmq.Socket[bytes]":
    """Makes a socket of name `identity` that can connect to `address`. Once closed, it still sends for `linger_ms`."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, linger_ms)
    socket.setsockopt(zmq.IPV6, "[" in address)
    return socket


def connect(context: "zmq.Context[zmq.Socket[bytes]]", address: str, identity: bytes, linger_ms: int = 0) -> "zmq.Socket[bytes]":
    """Makes a socket as `executor_socket` does, and connects it."""
    socket = executor_socket(context, address, identity, linger_ms)
    socket.connect(address)
    return socket


class PlanSocket:
    """Receives what an executor sends its ready worker: masks, for the step that waits for them, and apart from these all else."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._decode = msgspec.msgpack.Decoder(ToReadyWorker).decode
        self._masks: deque[StepMasks] = deque()
        self._messages: deque[PlanMessage] = deque()

    @property
    def has_message(self) -> bool:
        """True when a message was received while masks were waited for."""
        return bool(self._messages)

    def next(self, timeout_ms: int = 0) -> PlanMessage | None:
        """Returns the next message that is no mask; None when there is none for `timeout_ms`."""
        while not self._messages and self.socket.poll(timeout_ms):
            self._receive()
        return self._messages.popleft() if self._messages else None

    def receive(self, timeout: float) -> StepMasks | None:
        """See `MaskSource`."""
        end = time.monotonic() + timeout
        while not self._masks and self.socket.poll(max(0, round(1000 * (end - time.monotonic())))):
            self._receive()
        return self._masks.popleft() if self._masks else None

    def _receive(self) -> None:
        message: ToReadyWorker = self._decode(self.socket.recv())
        if isinstance(message, StepMasks):
            self._masks.append(message)
        else:
            self._messages.append(message)


class HeartbeatSender:
    """Sends heartbeats, with the progress count, from a worker on another node than its executor.

    It ends the worker's process when the executor is gone. It has a thread and a socket of its own, so that neither a
    long load nor a collective delays a heartbeat.
    """

    def __init__(self, address: str, rank: int, count: Callable[[], ProgressCount]) -> None:
        self._count = count
        # A context of its own: the one of the worker's other socket is terminated before the process ends.
        self._socket = executor_socket(zmq.Context(), address, heartbeat_identity(rank))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, CONNECTION_TIMEOUT_MS // 5)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, CONNECTION_TIMEOUT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            self._socket.send(encode(Heartbeat(self._count())))
            if self._monitor.poll(round(1000 * HEARTBEAT_SECONDS)):
                self._on_event()
            while self._socket.poll(0):
                self._socket.recv()  # an empty probe: the executor sends it to see whether this worker is still connected

    def _on_event(self) -> None:
        """Ends the process when the connection ends: the executor never closes the connection of a worker that it still needs."""
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
            logger.info("the executor is gone; this worker ends")
            os._exit(0)


class TransferSocket:
    """Receives transfer orders, and sends their answers.

    It has a thread and a socket of its own: while a step runs, nobody reads the socket that step plans come by.
    """

    def __init__(self, address: str, rank: int) -> None:
        context = zmq.Context()
        self._socket = connect(context, address, transfer_identity(rank))
        self._replies = context.socket(zmq.PULL)
        self._replies.bind(REPLIES)
        self._reply_socket = context.socket(zmq.PUSH)
        self._reply_socket.connect(REPLIES)
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(TransferChunks).decode

    def reply(self, message: TransferDone | TierStatus) -> None:
        """Sends an answer. Any thread may call it."""
        with self._lock:
            self._reply_socket.send(self._encode(message))

    def serve(self, transfer: Callable[[Sequence[TransferOrder]], None]) -> None:
        """Starts a thread that gives orders to `transfer`. It sends TransfersReady to the executor first."""
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
                transfer(self._decode(self._socket.recv()).orders)
