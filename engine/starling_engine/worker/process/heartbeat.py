"""Heartbeats of a worker on another node than its executor: they have its progress. It ends when its executor is gone."""

import logging
import os
import threading
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from starling_engine.worker.counters import ProgressCount
from starling_engine.worker.messages import HEARTBEAT_SECONDS, Heartbeat, heartbeat_identity
from starling_engine.worker.process.executor_socket import executor_socket

GONE_MS = 10_000
"""Silence after which a machine is gone: one whose power is cut closes no connection."""
logger = logging.getLogger("starling.worker")


class HeartbeatSender:
    """Runs in a thread with a socket of its own, so that neither a long load nor a collective delays a heartbeat."""

    def __init__(self, address: str, rank: int, count: Callable[[], ProgressCount]) -> None:
        self._count = count
        # A context of its own: that of the worker's other socket is ended before the process is.
        self._socket = executor_socket(zmq.Context(), address, heartbeat_identity(rank))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, GONE_MS // 5)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, GONE_MS)
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
                self._socket.recv()  # the executor only looks whether it can be sent

    def _on_event(self) -> None:
        """Ends the process when the connection ends: the executor never closes that of a worker which it still needs."""
        if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
            logger.info("the executor is gone; this worker ends")
            os._exit(0)
