"""Publishes KV events over ZeroMQ as vLLM does: numbered batches to all listeners, and replays of batches that they missed.

Numbers are 8 bytes, big-endian, and count from 0. Each data parallel rank has its own ports: the first ones plus its rank.

    PUB, PORT             | topic | number | batch, msgpack |
    ROUTER, PORT + 100    request: | empty | number |
                          answer, for each batch from there on: | empty | number | batch |; at the end | empty | -1 | empty |
"""

import logging
import re
import threading
import time
from collections import deque

import msgspec
import zmq

from starling_engine.errors import ConfigError
from starling_engine.kv.event_endpoint import REPLAY_PORT_OFFSET, parse_endpoint
from starling_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

logger = logging.getLogger("starling.events")

MAX_QUEUED = 10_000
"""Batches that a slow listener may be behind; then it misses some, and notices by their numbers."""
MAX_REPLAYED = 10_000
MAX_REPLAYED_BYTES = 64 << 20
"""Limit of the batches that can be replayed, with MAX_REPLAYED."""
POLL_MS = 500
END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publishes batches of events. One thread calls `publish` and `close`, another replays; neither waits for listeners."""

    def __init__(self, endpoint: str, rank: int = 0) -> None:
        """Binds if the host is * or an IPv6 address, else connects, as vLLM does. Raises ConfigError if that fails."""
        parsed = parse_endpoint(endpoint)
        host, port = parsed.host, parsed.port + rank
        self._rank = rank
        self._topic = parsed.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0
        self._replayable: deque[tuple[int, bytes]] = deque()
        self._replay_bytes = 0
        self._lock = threading.Lock()
        """Guards the batches for replays."""
        self._closing = False
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(MAX_QUEUED)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 2 * MAX_REPLAYED)
        try:
            self._open(host, port, parsed.binds)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            problem = f"cannot publish at {host}:{port}, or take requests at port {port + REPLAY_PORT_OFFSET}: {error}"
            raise ConfigError(problem, "kv_events") from None
        self._thread = threading.Thread(target=self._serve_replays, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, host: str, port: int, binds: bool) -> None:
        for socket in (self._pub, self._router):
            # `*` and names mean both families; if the kernel has only one, ZeroMQ takes that.
            socket.setsockopt(zmq.IPV6, re.fullmatch(r"[\d.]+", host) is None)
            socket.setsockopt(zmq.LINGER, 0)
        if binds:
            self._pub.bind(f"tcp://{host}:{port}")
        else:
            self._pub.connect(f"tcp://{host}:{port}")
        self._router.bind(f"tcp://{host if binds else '*'}:{port + REPLAY_PORT_OFFSET}")

    def publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Publishes a batch. Never waits: a listener that is too slow misses it."""
        payload = self._encode(KVEventBatch(time.time(), events, self._rank))
        number, self._number = self._number, self._number + 1
        with self._lock:
            self._replayable.append((number, payload))
            self._replay_bytes += len(payload)
            while len(self._replayable) > MAX_REPLAYED or self._replay_bytes > MAX_REPLAYED_BYTES:
                self._replay_bytes -= len(self._replayable.popleft()[1])
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._pub.close()
        self._context.term()

    def _serve_replays(self) -> None:
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
            wanted = [(number, payload) for number, payload in self._replayable if number >= first]
        for number, payload in wanted:
            self._router.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._router.send_multipart((client, b"", END, b""))
