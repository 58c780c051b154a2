"""The helper process as the engine holds it: memory that both map, calls with a time limit, and answers by their number."""

import contextlib
import itertools
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Literal

import msgspec

from starling_engine.kv_offload.secondary.store.address import StoreAddress
from starling_engine.kv_offload.secondary.store.messages import (
    PACKET,
    FromHelper,
    Imported,
    Setup,
    StoreAnswer,
    StoreCall,
    StoreFailed,
    StoreReady,
    Unusable,
)
from starling_engine.kv_offload.secondary.store.space import Space

CHATTER = re.compile(rb"[IW]\d{4} ")
"""What the library logs and is no error; it does not heed glog's own setting."""
PROCESS_CLOCK = 2
"""With a process's number above it, the clock of its processor time on Linux: see clock_getcpuclockid(3)."""
GRACE = 4.0
"""Seconds that a helper has to take leave of the store."""

_decode = msgspec.msgpack.Decoder(FromHelper).decode


class Late(Exception):
    """No answer in time. What the call was to read or write stays reserved until the answer comes."""


class Gone(Exception):
    """The helper has ended, or takes no more calls; the message says why."""


class NoSpace(Exception):
    """All memory for values on their way is in use, for as long as this call could wait."""


@dataclass(slots=True)
class Pending:
    call: StoreCall
    place: "BufferRange | None"
    came: threading.Event = field(default_factory=threading.Event)
    codes: list[int] | None = None


class StoreClient:
    """One helper. When it has ended another one takes its place, with memory of its own. Threads may call at once."""

    def __init__(self, address: StoreAddress, on_end: Callable[[], None]) -> None:
        """Start it in a thread that lives longer than the helper is to. `on_end` is called, in another, when it has ended.

        Raises OSError where there can be no helper: this machine is out of something.
        """
        self.ready = threading.Event()
        """Set as well when it never will be: see `failure`."""
        self.imported = threading.Event()
        self.unusable: str | None = None
        """Why the library cannot be loaded on this machine."""
        self.failure: str | None = None
        self._on_end = on_end
        self._size = address.buffer
        self._space = Space(address.buffer)
        self._changed = threading.Condition()
        """Guards the space and what is pending; notified when there is more space."""
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count()
        self._encode = msgspec.msgpack.Encoder().encode
        self._start(address)

    def _start(self, address: StoreAddress) -> None:
        setup = Setup(address.host, address.metadata, address.segment, self._size, address.master, address.port)
        memory = os.memfd_create("starling-store")
        os.ftruncate(memory, self._size)
        self._map = mmap.mmap(memory, self._size)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "starling_engine.kv_offload.secondary.store.helper", str(theirs.fileno()), str(memory)],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        os.close(memory)
        self._last_words: deque[str] = deque(maxlen=1)
        assert self._process.stderr is not None
        with contextlib.suppress(OSError):  # it has ended already, which the reader finds
            self._link.send(self._encode(setup))
        self._listener = threading.Thread(target=self._listen, name="store-answers", daemon=True)
        self._words = threading.Thread(target=self._read_words, args=(self._process.stderr,), name="store-words", daemon=True)
        self._words.start()
        self._listener.start()

    # ---- calls ----

    @contextmanager
    def space(self, size: int, deadline: float) -> Iterator["BufferRange"]:
        """Memory for one value. Raises NoSpace. It is given back at the end, or when the answer comes to a call that was late."""
        with self._changed:
            while (start := self._space.take(size)) is None:
                if size > self._size or not self._changed.wait(deadline - time.monotonic()):
                    raise NoSpace(f"{size} bytes wanted, {self._space.num_free} of {self._size} free")
        place = BufferRange(start, size, memoryview(self._map)[start : start + size])
        try:
            yield place
        finally:
            place.view.release()
            if not place.abandoned:
                self._give(place.start, size)

    def _give(self, start: int, size: int) -> None:
        with self._changed:
            self._space.give(start, size)
            self._changed.notify_all()

    def call(
        self, what: Literal["find", "get", "put", "drop"], keys: list[str], deadline: float, place: "BufferRange | None" = None
    ) -> list[int]:
        """The code for each key. Raises Late or Gone. `deadline` is by the monotonic clock."""
        call = StoreCall(next(self._numbers), what, keys, deadline)
        if place is not None:
            call.offset, call.size = place.start, place.size
        pending = Pending(call, place)
        with self._changed:
            self._pending[call.id] = pending
        try:
            self._link.send(self._encode(call), socket.MSG_DONTWAIT)
        except OSError as error:
            with self._changed:
                self._pending.pop(call.id, None)
            raise Gone(self.failure or f"it takes no calls: {error}") from None
        pending.came.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            if pending.codes is not None:
                return pending.codes
            if self.failure is not None:
                raise Gone(self.failure)
            if place is not None:
                place.abandoned = True
        raise Late(f"no answer to {what} in time")

    def leave(self) -> None:
        """Nobody waits any longer: all calls that have no answer yet are late."""
        with self._changed:
            for pending in self._pending.values():
                pending.came.set()

    @property
    def oldest_late(self) -> float | None:
        """For how many seconds a call that nobody waits for any more has been going on; None where there is none."""
        now = time.monotonic()
        with self._changed:
            late = [now - pending.call.deadline for pending in self._pending.values() if pending.call.deadline < now]
        return max(late, default=None)

    # ---- its end ----

    def close(self, grace: float) -> None:
        """Lets it take leave of the store, and ends it if that takes too long. 0 kills it at once."""
        if not grace:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(grace or None)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._words.join()
        self._link.close()
        with contextlib.suppress(BufferError):  # a caller is still copying: the map goes with its view
            self._map.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the helper has taken so far; 0 when it has ended."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | PROCESS_CLOCK)
        except OSError:
            return 0.0

    def _listen(self) -> None:
        while packet := self._receive():
            match _decode(packet):
                case StoreAnswer(number, codes):
                    self._take(number, codes)
                case Imported():
                    self.imported.set()
                case StoreReady():
                    self.ready.set()
                case Unusable(reason):
                    self.unusable = reason
                case StoreFailed(reason):
                    self.failure = reason
                    self.ready.set()
        self._ended()

    def _receive(self) -> bytes:
        try:
            return self._link.recv(PACKET)
        except OSError:
            return b""

    def _take(self, number: int, codes: list[int]) -> None:
        with self._changed:
            # Whoever called decides under the same lock: it has seen the answer, or has left the space to this thread.
            pending = self._pending.pop(number)
            pending.codes = codes
            place = pending.place
            left = place is not None and place.abandoned
        pending.came.set()
        if left and place is not None:
            self._give(place.start, place.size)

    def _ended(self) -> None:
        code = self._process.wait()
        self._words.join()
        said = f": {self._last_words[0]}" if self._last_words else ""
        self.failure = self.failure or f"the store's library ended with {code}{said}"
        with self._changed:
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.came.set()
        self.imported.set()
        self.ready.set()
        self._on_end()

    def _read_words(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                if not CHATTER.match(line):
                    self._last_words.append(line.decode(errors="replace").strip()[:200])


@dataclass(slots=True)
class BufferRange:
    """A range of the memory that both map; `view` is valid until the end of `space`."""

    start: int
    size: int
    view: memoryview
    abandoned: bool = False
