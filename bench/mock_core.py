"""An engine core that computes nothing: it speaks the protocol of cores, and writes a recorded output to all requests.

As a real core it sends one message of deltas a step, a token for each request; steps come at a set rate.
"""

import time
import uuid
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import zmq
from starling_engine.core.messages import Add, Deltas, FromFrontend, Hello, Ping, Pong, ShutdownCore
from starling_engine.delta import Delta, Stats
from starling_engine.ledger import Ledger
from starling_engine.topology.layout import EpochMembership, ParallelLayout

LONGEST = 4096


class Round(NamedTuple):
    """Asks for a round: steps begin when so many requests are there."""

    requests: int
    tokens_per_second: float


class MockCore:
    """Serves one frontend. `output` is each request's, its last token being the one that ends it."""

    def __init__(self, address: str, output: list[int], control: Connection) -> None:
        self._output = output
        self._control = control
        self._socket = zmq.Context().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._decode = msgspec.msgpack.Decoder(FromFrontend).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._incarnation = uuid.uuid4().hex
        self._frontend = b""
        self._requests: list[str] = []
        self._steps = 0
        self._is_ended = False
        self._is_greeted = False

    def run(self) -> None:
        self._control.send("ready")
        while not self._is_ended:
            if self._control.poll():
                self._round(self._control.recv())
            self._receive(0.05)

    def _round(self, asked: Round) -> None:
        while len(self._requests) < asked.requests and not self._is_ended:
            self._receive(0.05)
        due = time.monotonic() + 0.2
        self._control.send(due)
        sent = []
        for step in range(len(self._output)):
            while (left := due - time.monotonic()) > 0:
                self._receive(left)
            sent.append(self._step(step))
            due += 1 / asked.tokens_per_second
        self._requests = []
        self._control.send(sent)

    def _step(self, step: int) -> float:
        """Sends a token to each request. Returns when."""
        token, last = self._output[step], step == len(self._output) - 1
        ends = {"finish_reason": "stop"} if last else {}
        deltas = [Delta(id=name, tokens=[token], cached_tokens=None if step else 0, **ends) for name in self._requests]
        self._steps += 1
        message = self._encode(Deltas(deltas, self._stats()))
        now = time.monotonic()
        self._socket.send_multipart([self._frontend, message])
        return now

    def _receive(self, seconds: float) -> None:
        """Handles messages that are there, and waits for the first one."""
        if not self._socket.poll(max(0, int(seconds * 1000))):
            return
        self._frontend, payload = self._socket.recv_multipart()
        match self._decode(payload):
            case Ping():
                self._answer_ping()
            case Add() as added:
                self._requests.append(added.request.id)
            case ShutdownCore():
                self._is_ended = True

    def _answer_ping(self) -> None:
        if not self._is_greeted:  # a Hello that comes twice would end open requests
            self._is_greeted = True
            self._send(self._hello())
        self._send(Pong(self._incarnation, self._steps, bool(self._requests), self._stats()))

    def _send(self, message: Hello | Pong) -> None:
        self._socket.send_multipart([self._frontend, self._encode(message)])

    def _stats(self) -> Stats:
        return Stats(running=len(self._requests), steps_total=self._steps)

    def _hello(self) -> Hello:
        memory = Ledger(total=0, limit=0, weights=0, activations=0, kv=0, slab_bytes=1, num_blocks=1, block_size=16)
        membership = EpochMembership.first(ParallelLayout())
        return Hello(self._incarnation, LONGEST, LONGEST, membership, 0, memory, self._stats(), taking=True)


def run(address: str, output: list[int], control: Connection) -> None:
    """Runs a core to its end. `control` says when it listens, and of each Round when it begins and when its steps were sent."""
    MockCore(address, output, control).run()
