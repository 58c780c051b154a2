"""The engine core as a process: a ROUTER socket, the core, and nothing else.

Started by `launcher` with its configuration on standard input, which stays open: its end means that the parent is gone.
"""

import logging
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from starling_engine.config import EngineConfig
from starling_engine.core.engine_core import EngineCore
from starling_engine.core.launcher import AHEAD, CoreStart
from starling_engine.core.messages import (
    Abort,
    Add,
    Call,
    Deltas,
    FollowCache,
    FromCore,
    FromFrontend,
    FrontendCall,
    Hello,
    LeaveCache,
    Loading,
    Ping,
    Pong,
    ResetPrefixCache,
    ShutdownCore,
)
from starling_engine.delta import Delta, Stats
from starling_engine.errors import StarlingError
from starling_engine.executor.base import Executor, has_gpu, make_executor
from starling_engine.ipc.child import import_for_good, live_with_parent
from starling_engine.ipc.collection import freeze_heap
from starling_engine.ipc.listening import listen
from starling_engine.ipc.log_lines import EXIT_LOGGER
from starling_engine.kv.publisher import EventPublisher
from starling_engine.request import EngineRequest
from starling_engine.sleep import ASLEEP

logger = logging.getLogger("starling.core")

LEAVE_SECONDS = 2.0
"""Longest wait, at the end, for chunks that are written back."""
IDLE_POLL_MS = 1000
LOADING_POLL_MS = 50
REPLY_POLL_MS = 5
"""Poll interval while ranks prepare an epoch or switch to it, transfer chunks, fall asleep or wake."""
RECEIVE_SECONDS = 0.005
"""Time for messages before the next step, however many there are; a message that takes longer is handled alone."""
ALIVE_SECONDS = 0.5
"""Time between two unasked pongs, for frontends whose pings could not be received yet."""
FRONTEND_TIMEOUT = 15.0
"""Seconds of a frontend's silence after which its requests are aborted."""


class CoreProcess:
    """Answers frontends and steps the core. One thread does both: a frontend waits for an answer at most COLLECT_SECONDS."""

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        executor: Executor,
        host: str | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.core: EngineCore | None = None
        self.incarnation = uuid.uuid4().hex
        self.stopping = False
        self._on_ready = on_ready
        self._owners: dict[str, bytes] = {}
        """The frontend of each request."""
        self._last_message: dict[bytes, float] = {}
        """Time of each frontend's last message."""
        self._last_look = 0.0
        """Time when frontends' silence was last looked at."""
        self._greeted: set[bytes] = set()
        self._last_pong = 0.0
        self._decode = msgspec.msgpack.Decoder(FromFrontend).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # Without this option a ROUTER drops messages to a peer that is gone without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._address = listen(self._socket, host) if host else ""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._publisher = EventPublisher(config.kv_events, config.data_parallel_rank) if config.kv_events else None

    def run(self) -> None:
        """Serves until a frontend sends ShutdownCore. Raises the error that ended the loading."""
        try:
            self.executor.start()
            while self.core is None and not self.stopping:
                self._receive(LOADING_POLL_MS)
                if (report := self.executor.ready(timeout=0.0001)) is not None:
                    self.core = EngineCore(self.config, self.executor, report)
                    self._poller.register(self.core.wakeup.fd, zmq.POLLIN)
                    self._on_ready()
                    logger.info("ready, with %s", report.ledger.room)
            while not self.stopping:
                assert self.core is not None
                self._step(self.core)
            self._leave()
        finally:
            self.executor.shutdown()
            if self._publisher is not None:
                self._publisher.close()
            self._socket.close()
            self._context.term()

    def _step(self, core: EngineCore) -> None:
        self._receive(0 if not core.can_sleep else REPLY_POLL_MS if core.replies_soon else IDLE_POLL_MS)
        self.executor.check()
        self._send_deltas(core.step())
        self._publish(core)
        self._send_outbox(core)
        self._forget_silent()

    def _leave(self) -> None:
        try:
            if self.core is not None:
                self.core.leave(LEAVE_SECONDS)
        except StarlingError as error:  # a rank of a group that ends may have ended first
            logger.warning("not all of the cached keys and values has been written: %s", error)

    def _receive(self, timeout_ms: int) -> None:
        """Handles messages that are there, for RECEIVE_SECONDS at most; waits for the first one at most `timeout_ms`.

        The core's wake-up call ends the wait, too.
        """
        end = math.inf
        while self._socket in dict(self._poller.poll(timeout_ms)):
            if time.monotonic() > end:
                self._show_life()
                return
            end = min(end, time.monotonic() + RECEIVE_SECONDS)
            identity, *frames = self._socket.recv_multipart()
            payload = b"".join(frames)
            self._last_message[identity] = time.monotonic()
            try:
                message = self._decode(payload)
            except msgspec.DecodeError as error:
                logger.warning("a message of %d bytes was refused: %s", len(payload), error)
                continue
            self._handle(identity, message)
            timeout_ms = 0

    def _show_life(self) -> None:
        """Sends all frontends a pong: their pings wait behind the requests that were sent before."""
        if self.core is not None and time.monotonic() - self._last_pong > ALIVE_SECONDS:
            self._last_pong = time.monotonic()
            self._send_to_all(self._pong(self.core))

    def _handle(self, identity: bytes, message: FromFrontend) -> None:
        match message:
            case Ping():
                self._answer_ping(identity)
            case ShutdownCore():
                self.stopping = True
            case _ if self.core is None:
                logger.warning("%s came before the core was ready", type(message).__name__)
            case Add():
                self._add(self.core, identity, message.unpacked())
            case Abort(ids):
                for request_id in ids:
                    if self._owners.get(request_id) == identity:
                        self._abort(request_id)
            case Call(number, command):
                deltas = self.core.handle(command, FrontendCall(identity, number))
                self._send_outbox(self.core)  # first: a request of a core that leaves must not be sent back here
                self._send_deltas(deltas)
            case ResetPrefixCache():
                self.core.scheduler.reset_prefix_cache()
            case FollowCache(listener):
                self._publish(self.core)  # first: what has changed until now is part of all that is cached
                self.core.followers.add(FrontendCall(identity, listener))
            case LeaveCache():
                self.core.followers.remove(identity)

    def _add(self, core: EngineCore, identity: bytes, request: EngineRequest) -> None:
        answer = core.add(request) if core.sleeper.state.taking else _refused(request)
        if answer is None:
            self._owners[request.id] = identity
        else:
            self._send(identity, Deltas([answer], self._stats()))

    def _answer_ping(self, identity: bytes) -> None:
        if self.core is None:
            phase = self.executor.phase
            self._send(identity, Loading(phase.name, phase.done, phase.total, self.executor.joining))
            return
        if identity not in self._greeted:
            self._greeted.add(identity)
            self._send(identity, self._hello(self.core))
        self._send(identity, self._pong(self.core))

    def _pong(self, core: EngineCore) -> Pong:
        return Pong(self.incarnation, self.executor.progress, core.has_work, self._stats())

    def _hello(self, core: EngineCore) -> Hello:
        held = core.scheduler.kv.max_tokens
        longest = min(self.config.scheduler.max_model_len, held)
        return Hello(
            incarnation=self.incarnation,
            max_tokens_per_request=longest,
            max_tokens=held,
            membership=core.epochs.membership,
            store=core.store_port,
            ledger=core.ledger,
            stats=self._stats(),
            taking=core.epochs.taking,
            address=self._address,
            start_seconds=core.start_seconds,
            sleep=core.sleeper.announced,
        )

    def _stats(self) -> Stats:
        assert self.core is not None
        return self.core.scheduler.snapshot()

    def _publish(self, core: EngineCore) -> None:
        if events := core.scheduler.kv.events.take():
            core.followers.publish(events)
            if self._publisher is not None:
                self._publisher.publish(events)

    def _send_outbox(self, core: EngineCore) -> None:
        for frontend, message in core.outbox.take():
            if frontend is None:
                self._send_to_all(message)
            else:
                self._send(frontend, message)

    def _send_to_all(self, message: FromCore) -> None:
        for identity in tuple(self._greeted):
            self._send(identity, message)

    def _send_deltas(self, deltas: list[Delta]) -> None:
        """Sends one message for each frontend whose requests have deltas."""
        by_owner: dict[bytes, list[Delta]] = {}
        for delta in deltas:
            owner = self._owners.get(delta.id)
            if owner is not None:
                by_owner.setdefault(owner, []).append(delta)
                if delta.finish_reason is not None:
                    del self._owners[delta.id]
        for owner, owned in by_owner.items():
            self._send(owner, Deltas(owned, self._stats()))

    def _send(self, identity: bytes, message: FromCore) -> None:
        try:
            self._socket.send_multipart((identity, self._encode(message)))
        except zmq.ZMQError as error:
            logger.warning("a frontend is gone (%s); its requests are aborted", error)
            self._drop_frontend(identity)

    def _forget_silent(self) -> None:
        """Drops frontends that are silent. Where this process stood still itself, they may have, too, and get the time again."""
        now = time.monotonic()
        if now - self._last_look > FRONTEND_TIMEOUT / 2:
            self._last_message = dict.fromkeys(self._last_message, now)
        self._last_look = now
        for identity in [i for i, last in self._last_message.items() if now - last > FRONTEND_TIMEOUT]:
            self._drop_frontend(identity)

    def _drop_frontend(self, identity: bytes) -> None:
        self._last_message.pop(identity, None)
        self._greeted.discard(identity)
        if self.core is not None:
            self.core.followers.remove(identity)
        for request_id in [r for r, owner in self._owners.items() if owner == identity]:
            self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        del self._owners[request_id]
        if self.core is not None:
            self.core.abort(request_id)


def _refused(request: EngineRequest) -> Delta:
    return Delta(request.id, request.attempt, finish_reason="error", error=ASLEEP, asleep=True)


def main() -> None:
    """`python -m starling_engine.core [ahead]`, with a `CoreStart` as one line of JSON on standard input."""
    if AHEAD in sys.argv[1:] and not has_gpu():  # where a worker is a process of its own, this one needs no torch
        threading.Thread(target=import_for_good, args=("torch",), daemon=True).start()
    line = sys.stdin.buffer.readline()
    if not line:  # the parent ended before it had a config
        os._exit(0)
    start = msgspec.json.decode(line, type=CoreStart)
    live_with_parent(start.log_level)
    try:
        # Next to the core's own socket, in a folder that the parent removes.
        executor = make_executor(start.config, Path(start.address.removeprefix("ipc://")).parent, start.host)
        CoreProcess(start.config, start.address, executor, start.host, freeze_heap).run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the frontend reads of it in the log
        if not isinstance(error, StarlingError):
            logger.error("the engine core ends:\n%s", traceback.format_exc())
        logging.getLogger(EXIT_LOGGER).critical("%s: %s", type(error).__name__, error)
        os._exit(3)
    os._exit(0)
