"""A frontend's connection to one engine core."""

import asyncio
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import Abort, Add, Deltas, FromCore, FromFrontend, Hello, Loading, Ping, Pong
from starling_engine.delta import Delta, Stats
from starling_engine.errors import EngineDead

PING_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""A core that has not answered for so long is dead: it answers at least every COLLECT_SECONDS."""

DeltaSink = Callable[[Delta], None]


class CoreClient:
    """Sends requests to one core, hands its deltas to each request's sink, and notices when it dies or hangs.

    A core is dead when its process ended, when it is silent, when its incarnation changed, or when it has work but makes no
    progress for `progress_timeout` seconds. Every open request then gets a delta with the error.
    """

    def __init__(
        self, context: zmq.asyncio.Context, address: str, progress_timeout: float, process: CoreHandle | None = None
    ) -> None:
        self.stats = Stats()
        self.hello: Hello | None = None
        self.failure: str | None = None
        self._process = process
        self._progress_timeout = progress_timeout
        self._sinks: dict[str, DeltaSink] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._heard = self._advanced = time.monotonic()
        self._progress = -1
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromCore).decode
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)

    @property
    def load(self) -> int:
        """How busy the core is, for choosing among several."""
        return 4 * self.stats.waiting + max(self.stats.running, len(self._sinks) - self.stats.waiting)

    async def connect(self, on_phase: Callable[[Loading], None] | None = None) -> Hello:
        """Waits until the core is ready. Raises what ended its loading, or EngineDead when it does not answer."""
        self._heard = time.monotonic()
        last: Loading | None = None
        while self.hello is None:
            await self.send(Ping())
            if await self._socket.poll(50):
                message = self._decode(await self._socket.recv())
                if isinstance(message, Loading) and on_phase is not None and message != last:
                    last = message
                    on_phase(message)
                self._take(message)
            if self._process is not None and self._process.exit_reason() is not None:
                raise self._process.error()
            if self._process is None and time.monotonic() - self._heard > SILENCE_SECONDS:
                raise EngineDead(f"no engine core answers (waited {SILENCE_SECONDS:g} s)")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return self.hello

    async def send(self, message: FromFrontend) -> None:
        await self._socket.send(self._encode(message))

    async def add(self, message: Add, sink: DeltaSink) -> None:
        """Sends a request whose deltas go to `sink`. Raises EngineDead."""
        self.check()
        self._sinks[message.request.id] = sink
        await self.send(message)

    async def abort(self, ids: list[str]) -> None:
        own = [i for i in ids if self._sinks.pop(i, None) is not None]
        if own and self.failure is None:
            await self.send(Abort(own))

    def check(self) -> None:
        """Raises EngineDead with the cause when the core has failed."""
        if self.failure is not None:
            raise EngineDead(self.failure)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    # ---- what comes back ----

    async def _receive(self) -> None:
        while True:
            self._take(self._decode(await self._socket.recv()))

    def _take(self, message: FromCore) -> None:
        self._heard = time.monotonic()
        match message:
            case Deltas(deltas, stats):
                self.stats = stats
                self._advanced = self._heard
                for delta in deltas:
                    self._deliver(delta)
            case Pong():
                self._take_pong(message)
            case Hello():
                self.hello, self.stats = message, message.stats
            case Loading():
                pass

    def _take_pong(self, pong: Pong) -> None:
        self.stats = pong.stats
        if self.hello is not None and pong.incarnation != self.hello.incarnation:
            self._fail("the engine core was restarted")
        if pong.progress != self._progress or not pong.busy:
            self._progress, self._advanced = pong.progress, self._heard

    def _deliver(self, delta: Delta) -> None:
        sink = self._sinks.get(delta.id)
        if sink is None:
            return
        if delta.finish_reason is not None:
            del self._sinks[delta.id]
        sink(delta)

    # ---- health ----

    async def _watch(self) -> None:
        while self.failure is None:
            await self.send(Ping())
            await asyncio.sleep(PING_SECONDS)
            now = time.monotonic()
            reason = self._process.exit_reason() if self._process is not None else None
            if reason is not None:
                self._fail(f"the engine core died: {reason}")
            elif now - self._heard > SILENCE_SECONDS:
                self._fail(f"the engine core has not answered for {now - self._heard:.0f} s")
            elif now - self._advanced > self._progress_timeout:
                self._fail(f"the engine core has work but made no progress for {now - self._advanced:.0f} s")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink(Delta(request_id, finish_reason="error", error=reason))
