"""A frontend's connection to one engine core."""

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import zmq
import zmq.asyncio

from starling_engine.core.launcher import CoreHandle
from starling_engine.core.messages import (
    Abort,
    Add,
    Answer,
    CacheNotice,
    Call,
    CoreCommand,
    CoreReply,
    Deltas,
    EpochNotice,
    FollowCache,
    FromCore,
    FromFrontend,
    Hello,
    LeaveCache,
    Loading,
    Ping,
    Pong,
)
from starling_engine.delta import MOVED, Delta, Stats
from starling_engine.errors import EngineDead, EpochFailed, InvalidRequest, PeerLost, SleepFailed, SleepRefused
from starling_engine.kv.changes import CacheChanges
from starling_engine.request import EngineRequest
from starling_engine.sleep import Mode, Sleep, SleepCommand, SleepState, Slept, Tag, WakeUp
from starling_engine.topology.epoch import Abandon, Commit, EpochPlan, Prepare, Prepared, Rearranged, Switched, Unprepared
from starling_engine.topology.placement import Layer

PING_SECONDS = 0.5
LOADING_PING_SECONDS = 0.03
SILENCE_SECONDS = 5.0
"""Longest silence of a core that lives: it answers at least every COLLECT_SECONDS."""

CAUSE_SECONDS = 2.0
"""Time that a core which only missed another one has to learn why, beyond the progress timeout."""
CAUSE_LOOK_SECONDS = 0.05

DeltaSink = Callable[[Delta], None]
CacheSink = Callable[[CacheChanges | None], None]
"""Gets what a core has cached and what changes; None: no more comes."""

_decode = msgspec.msgpack.Decoder(FromCore).decode


class OpenRequest(NamedTuple):
    """`wire_id` is the request's id and a suffix that no other Add has; the core knows the request by it."""

    wire_id: str
    attempt: int
    sink: DeltaSink


class PendingCommand(NamedTuple):
    command: CoreCommand
    reply: "asyncio.Future[CoreReply]"


class CoreClient:
    """Sends requests to one core, hands its deltas to each request's sink, and notices when it dies or hangs.

    A core is dead when its process has ended, when it is silent, or when its incarnation has changed. So is one that has work but
    makes no progress for `progress_timeout` seconds. Every open request then gets a delta with the error.
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
        """`name` is the core's name in errors; `group` gives the cores that it may miss, itself included."""
        self.name = name
        self.stats = Stats()
        self.hello: Hello | None = None
        self.failure: str | None = None
        self.rearranged: dict[int, dict[int, Layer]] = {}
        """Layers whose experts were rearranged in the newest epoch with any, and their placement now."""
        self.taking = False
        """True while the core takes requests."""
        self.sleep_state = SleepState()
        self._group = group
        self._missed_another = False
        """True when it ended, or ends, only because another core of the group had."""
        self._process = process
        self._progress_timeout = progress_timeout
        self._open: dict[str, OpenRequest] = {}
        """Requests by id. The core may still answer one that was closed: an id that comes again gets another `wire_id`."""
        self._nonce = uuid.uuid4().hex[:8]
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCommand] = {}
        """Calls that were not answered yet, by number."""
        self._followers: dict[int, CacheSink] = {}
        """Listeners to what the core has cached, by number."""
        self._tasks: list[asyncio.Task[None]] = []
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
        """Load of the core, for choosing among several."""
        return 4 * self.stats.waiting + max(self.stats.running, len(self._open) - self.stats.waiting)

    @property
    def idle(self) -> bool:
        """True while the core has no request of this frontend."""
        return not self._open

    async def connect(self, on_phase: Callable[[Loading], None] | None = None) -> Hello:
        """Waits until the core is ready. Raises the error that ended its loading, or EngineDead when it does not answer."""
        last: Loading | None = None
        while self.hello is None:
            await self.send(Ping())
            self._unanswered += 1
            next_ping = time.monotonic() + LOADING_PING_SECONDS
            while self.hello is None and (message := await self._receive_until(next_ping)) is not None:
                if isinstance(message, Loading) and message != last:
                    last = message
                    if on_phase is not None:
                        on_phase(message)
                self._handle(message)
            if self._process is not None and self._process.exit_reason() is not None:
                raise self._process.error(self.name)
            silence = self._unanswered * LOADING_PING_SECONDS  # pings, not seconds, as in `_watch`
            if last is not None and silence > max(self._progress_timeout, SILENCE_SECONDS):
                raise EngineDead(f"{self.name} stopped answering while it loaded")
            if self._process is None and last is None and silence > SILENCE_SECONDS:
                raise EngineDead(f"no engine core answers (waited {SILENCE_SECONDS:g} s)")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return self.hello

    async def _receive_until(self, end: float) -> FromCore | None:
        """Returns the next message, None when none comes before the time `end`."""
        if not await self._socket.poll(math.ceil(1000 * max(0.0, end - time.monotonic()))):
            return None
        message: FromCore = _decode(await self._socket.recv())
        return message

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
        wire_ids = [closed.wire_id for i in ids if (closed := self._open.pop(i, None)) is not None]
        if wire_ids:
            self._send_soon(Abort(wire_ids))

    def _send_soon(self, message: FromFrontend) -> None:
        """Sends to a core that has not failed, without waiting."""
        if self.failure is None and not self._socket.closed:
            sent = asyncio.ensure_future(self.send(message))
            self._sends.add(sent)
            sent.add_done_callback(self._sends.discard)

    @contextmanager
    def following(self, sink: CacheSink) -> Iterator[None]:
        """Has `sink` told what the core has cached, and then what changes. Raises EngineDead."""
        self.check()
        number = next(self._numbers)
        self._followers[number] = sink
        self._send_soon(FollowCache(number))
        try:
            yield
        finally:
            self._followers.pop(number, None)
            if not self._followers:
                self._send_soon(LeaveCache())

    def check(self) -> None:
        """Raises EngineDead with the cause when the core has failed."""
        if self.failure is not None:
            raise EngineDead(self.failure)

    async def prepare(self, epoch_plan: EpochPlan) -> Prepared:
        """Waits until the core's ranks can switch to an epoch. Raises EpochFailed where they cannot, EngineDead when it died."""
        reply = await self._call(Prepare(epoch_plan))
        if isinstance(reply, Unprepared):
            if PeerLost.is_reported_by(reply.error):
                await self._cause_of_group()
            raise EpochFailed(f"{self.name}: {reply.error}")
        assert isinstance(reply, Prepared)
        return reply

    async def commit(self, epoch: int) -> None:
        """Waits until the core's ranks have switched to the epoch that they have prepared. Raises EngineDead."""
        reply = await self._call(Commit(epoch))
        assert isinstance(reply, Switched)

    async def abandon(self, epoch: int) -> None:
        """Has the core's ranks forget an epoch, unless the connection is closed; does not wait."""
        if not self._socket.closed:
            await self.send(Call(next(self._numbers), Abandon(epoch)))

    async def sleep(self, level: int, mode: Mode) -> None:
        """Waits until the core sleeps. Raises SleepRefused, SleepFailed, or EngineDead."""
        await self._call_sleeper(Sleep(level, mode))

    async def wake_up(self, tags: list[Tag]) -> None:
        """Waits until the core has restored what the tags name. Raises SleepFailed or EngineDead."""
        await self._call_sleeper(WakeUp(tags))

    async def _call_sleeper(self, command: SleepCommand) -> None:
        reply = await self._call(command)
        assert isinstance(reply, Slept)
        if reply.refused is not None:
            raise SleepRefused(f"{self.name} does not sleep: {reply.refused}")
        if reply.error is not None:
            what = "fall asleep" if isinstance(command, Sleep) else "wake up"
            raise SleepFailed(f"{self.name} could not {what}: {reply.error}")

    async def _call(self, command: CoreCommand) -> CoreReply:
        """Waits for the answer. Raises EngineDead."""
        self.check()
        number, call = next(self._numbers), PendingCommand(command, asyncio.get_running_loop().create_future())
        self._calls[number] = call
        await self.send(Call(number, command))
        try:
            return await call.reply
        finally:
            self._calls.pop(number, None)

    async def close(self) -> None:
        """Ends the connection; open requests end with an error, and so do calls, except a coordinator's, which it ends itself."""
        reason = f"the connection to {self.name} was closed"
        self._end_all(reason)
        self._end_following()
        self._fail([call for call in self._calls.values() if isinstance(call.command, Sleep | WakeUp)], reason)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        if not self.taking:  # requests that were sent to it meanwhile
            self._end_all(None)

    # ---- messages of the core ----

    async def _receive(self) -> None:
        while True:
            self._handle(_decode(await self._socket.recv()))

    def _handle(self, message: FromCore) -> None:
        self._unanswered = 0
        match message:
            case Deltas(deltas, stats):
                self.stats = stats
                self._stalled = 0
                for delta in deltas:
                    self._deliver(delta)
            case Pong():
                self._on_pong(message)
            case Hello():
                if self.hello is not None:  # it had dropped this frontend, and its requests with it
                    self._end_all(f"{self.name} lost touch with this frontend and dropped its requests")
                    self._end_following()
                self.hello, self.stats, self.taking = message, message.stats, message.taking
                self.sleep_state = message.sleep
            case EpochNotice(membership, taking):
                self.taking = taking
                if self.hello is not None:
                    self.hello = msgspec.structs.replace(self.hello, membership=membership)
            case Answer(number, reply):
                call = self._calls.get(number)
                if call is not None and not call.reply.done():
                    call.reply.set_result(reply)
            case SleepState():
                self.sleep_state = message
            case CacheNotice(changes, listener):
                for number, sink in self._followers.items():
                    if listener in (0, number):
                        sink(changes)
            case Rearranged(epoch, _, layers):
                self.rearranged = {epoch: {**self.rearranged.get(epoch, {}), **layers}}
            case Loading():
                pass

    def _on_pong(self, pong: Pong) -> None:
        self.stats = pong.stats
        if self.hello is not None and pong.incarnation != self.hello.incarnation:
            self._die(f"{self.name} was restarted")
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
        """Counts pings, not seconds: a frontend that was itself held up must not mistake that for the core's silence."""
        while self.failure is None:
            await self.send(Ping())
            self._unanswered += 1
            await asyncio.sleep(PING_SECONDS)
            reason = self._process.exit_reason() if self._process is not None else None
            if reason is not None:
                await self._fail_with(reason)
            elif self._unanswered * PING_SECONDS > SILENCE_SECONDS:
                self._die(f"{self.name} has not answered for {SILENCE_SECONDS:g} s")
            elif self._stalled * PING_SECONDS > self._progress_timeout:
                self._die(f"{self.name} has work but made no progress for {self._progress_timeout:g} s")

    async def _fail_with(self, last_words: str) -> None:
        """Fails with the core's last words; or, if it only missed another core, with why that one ended, once that is known."""
        died = f"{self.name} died: {last_words}"
        self._missed_another = PeerLost.is_reported_by(last_words)
        cause = await self._cause_of_group() if self._missed_another else None
        self._die(f"{self.name} ended because {cause}" if cause else died)

    async def _cause_of_group(self) -> str | None:
        """Waits until a core of the group has failed for another reason than missing one, and returns that reason.

        None: all others only missed cores, too, or none has failed in time.
        """
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

    def _die(self, reason: str) -> None:
        self.failure = reason
        self._fail(self._calls.values(), reason)
        self._end_all(reason)
        self._end_following()

    def _fail(self, calls: Iterable[PendingCommand], reason: str) -> None:
        for call in calls:
            if not call.reply.done():
                call.reply.set_exception(EngineDead(reason))

    def _end_following(self) -> None:
        followers, self._followers = self._followers, {}
        for sink in followers.values():
            sink(None)

    def _end_all(self, reason: str | None) -> None:
        """Ends open requests. Without a reason they are only at the wrong core, and are moved."""
        requests, self._open = self._open, {}
        for request_id, (_, attempt, sink) in requests.items():
            sink(Delta(request_id, attempt, finish_reason="error" if reason else MOVED, error=reason))
