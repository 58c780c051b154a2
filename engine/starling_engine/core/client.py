"""A frontend's connection to one engine core."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import Abort, Add, Deltas, EpochNotice, FromCore, FromFrontend, Hello, Loading, Ping, Pong
from starling_engine.delta import MOVED, Delta, Stats
from starling_engine.errors import EngineDead, EpochFailed, InvalidRequest, PeerLost, SleepFailed, SleepRefused
from starling_engine.request import EngineRequest
from starling_engine.sleep import Mode, Sleep, SleepOrder, SleepState, Slept, Tag, WakeUp
from starling_engine.topology.epoch import Commit, EpochAnswer, Prepare, Prepared, Rearranged, Switched, Unprepared
from starling_engine.topology.placement import Layer

PING_SECONDS = 0.5
LOADING_PING_SECONDS = 0.03
SILENCE_SECONDS = 5.0
"""A core that has not answered for so long is dead: it answers at least every COLLECT_SECONDS."""

CAUSE_SECONDS = 2.0
"""For which, beyond the progress timeout, a core that only missed another one waits for that one's own words."""
CAUSE_LOOK_SECONDS = 0.05

DeltaSink = Callable[[Delta], None]

_decode = msgspec.msgpack.Decoder(FromCore).decode


class OpenRequest(NamedTuple):
    """`wire_id` is what the core calls it: the request's id and what no other Add has."""

    wire_id: str
    attempt: int
    sink: DeltaSink


class CoreClient:
    """Sends requests to one core, hands its deltas to each request's sink, and notices when it dies or hangs.

    A core is dead when its process ended, when it is silent, when its incarnation changed, or when it has work but makes no
    progress for `progress_timeout` seconds. Every open request then gets a delta with the error.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        progress_timeout: float,
        process: CoreHandle | None = None,
        name: str = "the engine core",
        group: "Callable[[], Iterable[CoreClient]]" = tuple,
    ) -> None:
        """`name` is what errors call it; `group` gives the cores that it may miss, and itself."""
        self.name = name
        self.stats = Stats()
        self.hello: Hello | None = None
        self.failure: str | None = None
        self.rearranged: dict[int, dict[int, Layer]] = {}
        """By epoch, the newest of them alone: where the experts of each layer lie that were rearranged in it."""
        self._group = group
        self._missed_another = False
        """Whether it ended, or ends, only because another core of the group had."""
        self._process = process
        self._progress_timeout = progress_timeout
        self._open: dict[str, OpenRequest] = {}
        """By id. The core may still answer one that was closed, so an id that comes again must be another one there."""
        self._nonce = uuid.uuid4().hex[:8]
        self._tasks: list[asyncio.Task[None]] = []
        self.taking = False
        """Whether the core takes requests now."""
        self._orders: dict[int, asyncio.Future[EpochAnswer]] = {}
        """By epoch, the order that was not answered yet."""
        self.sleep_state = SleepState()
        self._sleeps: dict[int, asyncio.Future[Slept]] = {}
        """By number, the orders to sleep or wake that were not answered yet."""
        self._numbers = itertools.count(1)
        self._unanswered = 0
        self._stalled = 0
        self._progress = -1
        self._sends: set[asyncio.Future[None]] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.connect(address)

    @property
    def load(self) -> int:
        """How busy the core is, for choosing among several."""
        return 4 * self.stats.waiting + max(self.stats.running, len(self._open) - self.stats.waiting)

    @property
    def idle(self) -> bool:
        """No request of this frontend is there."""
        return not self._open

    async def connect(self, on_phase: Callable[[Loading], None] | None = None) -> Hello:
        """Waits until the core is ready. Raises what ended its loading, or EngineDead when it does not answer."""
        last: Loading | None = None
        began = heard = time.monotonic()
        while self.hello is None:
            await self.send(Ping())
            await asyncio.sleep(LOADING_PING_SECONDS)
            if await self._socket.poll(0):
                message = _decode(await self._socket.recv())
                heard = time.monotonic()
                if isinstance(message, Loading) and message != last:
                    last = message
                    if on_phase is not None:
                        on_phase(message)
                self._take(message)
            if self._process is not None and self._process.exit_reason() is not None:
                raise self._process.error(self.name)
            if last is not None and time.monotonic() - heard > max(self._progress_timeout, SILENCE_SECONDS):
                raise EngineDead(f"{self.name} stopped answering while it loaded")
            if self._process is None and last is None and time.monotonic() - began > SILENCE_SECONDS:
                raise EngineDead(f"no engine core answers (waited {SILENCE_SECONDS:g} s)")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return self.hello

    async def send(self, message: FromFrontend) -> None:
        await self._socket.send(self._encode(message))

    async def add(self, request: EngineRequest, sink: DeltaSink) -> None:
        """Sends a request whose deltas go to `sink`. Raises EngineDead, or InvalidRequest for an id that is in use."""
        self.check()
        if request.id in self._open:
            raise InvalidRequest(f"a request with id {request.id!r} is running already", "request_id")
        wire_id = f"{request.id}#{self._nonce}-{next(self._numbers)}"
        parent = self._open.get(request.fork_of or "")
        self._open[request.id] = OpenRequest(wire_id, request.attempt, sink)
        await self.send(Add.of(msgspec.structs.replace(request, id=wire_id, fork_of=parent.wire_id if parent else None)))

    def abort(self, ids: list[str]) -> None:
        """Ends requests, without waiting; those that have ended are ignored."""
        own = [closed.wire_id for i in ids if (closed := self._open.pop(i, None)) is not None]
        if own and self.failure is None:
            sent = asyncio.ensure_future(self.send(Abort(own)))
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    def check(self) -> None:
        """Raises EngineDead with the cause when the core has failed."""
        if self.failure is not None:
            raise EngineDead(self.failure)

    async def order(self, order: Prepare | Commit) -> Prepared | Switched:
        """Waits for the answer. Raises EpochFailed where it cannot be, EngineDead when the core died."""
        self.check()
        number = order.epoch.number if isinstance(order, Prepare) else order.number
        answered = self._orders[number] = asyncio.get_running_loop().create_future()
        await self.send(order)
        try:
            answer: EpochAnswer = await answered
        finally:
            self._orders.pop(number, None)
        if isinstance(answer, Unprepared):
            if PeerLost.told_by(answer.error):
                await self._cause_of_group()
            raise EpochFailed(f"{self.name}: {answer.error}")
        return answer

    async def sleep(self, level: int, mode: Mode) -> None:
        """Waits until it sleeps. Raises SleepRefused, SleepFailed, or EngineDead."""
        await self._rest(Sleep(next(self._numbers), level, mode))

    async def wake_up(self, tags: list[Tag]) -> None:
        """Waits until what the tags name is there again. Raises SleepFailed or EngineDead."""
        await self._rest(WakeUp(next(self._numbers), tags))

    async def _rest(self, order: SleepOrder) -> None:
        self.check()
        answered = self._sleeps[order.number] = asyncio.get_running_loop().create_future()
        await self.send(order)
        try:
            answer = await answered
        finally:
            self._sleeps.pop(order.number, None)
        if answer.refused is not None:
            raise SleepRefused(f"{self.name} does not sleep: {answer.refused}")
        if answer.error is not None:
            what = "fall asleep" if isinstance(order, Sleep) else "wake up"
            raise SleepFailed(f"{self.name} could not {what}: {answer.error}")

    async def close(self) -> None:
        """Requests that are still open end with an error."""
        self._end_all(f"the connection to {self.name} was closed")
        _fail_all(self._sleeps.values(), f"the connection to {self.name} was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        if not self.taking:  # what was sent to it meanwhile
            self._end_all(None)

    # ---- what comes back ----

    async def _receive(self) -> None:
        while True:
            self._take(_decode(await self._socket.recv()))

    def _take(self, message: FromCore) -> None:
        self._unanswered = 0
        match message:
            case Deltas(deltas, stats):
                self.stats = stats
                self._stalled = 0
                for delta in deltas:
                    self._deliver(delta)
            case Pong():
                self._take_pong(message)
            case Hello():
                if self.hello is not None:  # it had given this frontend up, and its requests with it
                    self._end_all(f"{self.name} lost touch with this frontend and dropped its requests")
                self.hello, self.stats, self.taking = message, message.stats, message.taking
                self.sleep_state = message.sleep
            case EpochNotice(membership, taking):
                self.taking = taking
                if self.hello is not None:
                    self.hello = msgspec.structs.replace(self.hello, membership=membership)
            case Prepared() | Unprepared() | Switched():
                answered = self._orders.get(message.number)
                if answered is not None and not answered.done():
                    answered.set_result(message)
            case SleepState():
                self.sleep_state = message
            case Slept(number):
                asked = self._sleeps.get(number)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case Rearranged(epoch, _, layers):
                self.rearranged = {epoch: {**self.rearranged.get(epoch, {}), **layers}}
            case Loading():
                pass

    def _take_pong(self, pong: Pong) -> None:
        self.stats = pong.stats
        if self.hello is not None and pong.incarnation != self.hello.incarnation:
            self._fail(f"{self.name} was restarted")
        self._stalled = self._stalled + 1 if pong.busy and pong.progress == self._progress else 0
        self._progress = pong.progress

    def _deliver(self, delta: Delta) -> None:
        request_id = delta.id.rpartition("#")[0]
        request = self._open.get(request_id)
        if request is None or request.wire_id != delta.id:
            return
        if delta.finish_reason is not None:
            del self._open[request_id]
        delta.id = request_id
        request.sink(delta)

    # ---- health ----

    async def _watch(self) -> None:
        """Counts pings, not seconds: a frontend that was itself held up must not take that for the core's silence."""
        while self.failure is None:
            await self.send(Ping())
            self._unanswered += 1
            await asyncio.sleep(PING_SECONDS)
            reason = self._process.exit_reason() if self._process is not None else None
            if reason is not None:
                await self._fail_with(reason)
            elif self._unanswered * PING_SECONDS > SILENCE_SECONDS:
                self._fail(f"{self.name} has not answered for {SILENCE_SECONDS:g} s")
            elif self._stalled * PING_SECONDS > self._progress_timeout:
                self._fail(f"{self.name} has work but made no progress for {self._progress_timeout:g} s")

    async def _fail_with(self, last_words: str) -> None:
        """One that only missed another says whom, as soon as that is known."""
        died = f"{self.name} died: {last_words}"
        self._missed_another = PeerLost.told_by(last_words)
        cause = await self._cause_of_group() if self._missed_another else None
        self._fail(f"{self.name} ended because {cause}" if cause else died)

    async def _cause_of_group(self) -> str | None:
        """What ended a core of the group that knows it. Waits until one does, or all that could only missed others, too."""
        end = time.monotonic() + self._progress_timeout + CAUSE_SECONDS
        while time.monotonic() < end:
            others = [core for core in self._group() if core is not self]
            for core in others:
                if core.failure is not None and not core._missed_another:
                    return core.failure
            if all(core._missed_another for core in others):
                break
            await asyncio.sleep(CAUSE_LOOK_SECONDS)
        return None

    def _fail(self, reason: str) -> None:
        self.failure = reason
        _fail_all([*self._orders.values(), *self._sleeps.values()], reason)
        self._end_all(reason)

    def _end_all(self, reason: str | None) -> None:
        """Without a reason they are only at the wrong core."""
        requests, self._open = self._open, {}
        for request_id, (_, attempt, sink) in requests.items():
            sink(Delta(request_id, attempt, finish_reason="error" if reason else MOVED, error=reason))


def _fail_all(answers: Iterable[asyncio.Future[Any]], reason: str) -> None:
    for answered in answers:
        if not answered.done():
            answered.set_exception(EngineDead(reason))
