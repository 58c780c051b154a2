"""Publishes events over ZeroMQ as vLLM does: numbered batches to whoever listens, and again to whoever missed some.

Numbers are 8 bytes, big-endian, and count from 0. With data parallel ranks each has ports of its own, the first ones plus its rank.

    PUB, PORT             | topic | number | batch, msgpack |
    ROUTER, PORT + 100    a request: | empty | number |
                          its answer, for each batch from there on: | empty | number | batch |; and then | empty | -1 | empty |
"""

import logging
import re
import threading
import time
from collections import deque

import msgspec
import zmq

from starling_engine.errors import ConfigError
from starling_engine.kv.endpoint import REPLAY_PORT, parse_endpoint
from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

logger = logging.getLogger("starling.events")

QUEUED = 10_000
"""Batches that a slow listener may be behind; after that it misses some, and sees it by their numbers."""
KEPT = 10_000
KEPT_BYTES = 64 << 20
"""Of batches that can be asked for again."""
POLL_MS = 500
END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """`publish` and `close` belong to one thread; answers to requests come from another, and neither waits for listeners."""

    def __init__(self, endpoint: str, rank: int = 0) -> None:
        """Binds where the host is * or an IPv6 address, else connects, as vLLM does. Raises ConfigError where it cannot."""
        place = parse_endpoint(endpoint)
        host, port = place.host, place.port + rank
        self._rank = rank
        self._topic = place.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        """Of what is kept."""
        self._closing = False
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(QUEUED)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 2 * KEPT)
        try:
            self._open(host, port, place.binds)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            problem = f"cannot publish at {host}:{port}, or take requests at port {port + REPLAY_PORT}: {error}"
            raise ConfigError(problem, "kv_events") from None
        self._thread = threading.Thread(target=self._answer, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, host: str, port: int, binds: bool) -> None:
        for socket in (self._pub, self._router):
            # `*` and names mean both families; where the kernel has one alone, ZeroMQ takes that.
            socket.setsockopt(zmq.IPV6, re.fullmatch(r"[\d.]+", host) is None)
            socket.setsockopt(zmq.LINGER, 0)
        if binds:
            self._pub.bind(f"tcp://{host}:{port}")
        else:
            self._pub.connect(f"tcp://{host}:{port}")
        self._router.bind(f"tcp://{host if binds else '*'}:{port + REPLAY_PORT}")

    def publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """One batch. Never waits: what a listener is too slow for is dropped for it."""
        payload = self._encode(KVEventBatch(time.time(), events, self._rank))
        number, self._number = self._number, self._number + 1
        with self._lock:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._pub.close()
        self._context.term()

    def _answer(self) -> None:
        with self._router as router:
            while not self._closing:
                if router.poll(POLL_MS):
                    self._replay(router.recv_multipart())

    def _replay(self, request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            logger.warning("a request for events has to be an empty frame and a number of 8 bytes; one was not answered")
            return
        client, first = request[0], int.from_bytes(request[2], "big")
        with self._lock:
            wanted = [(number, payload) for number, payload in self._kept if number >= first]
        for number, payload in wanted:
            self._router.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._router.send_multipart((client, b"", END, b""))
