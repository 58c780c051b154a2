"""The engine's side of a helper process: memory that both map, calls with a time limit, and answers by their number."""

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
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from starling_engine.kv_offload.secondary.base import TierError
from starling_engine.kv_offload.secondary.store.address import StoreAddress
from starling_engine.kv_offload.secondary.store.helper import PACKET, StoreAnswer, StoreCall, StoreVerb

_INFORMATIVE = re.compile(rb"[IW]\d{4} ")
"""The beginning of a line of glog that is no error: the library does not heed glog's own setting."""


class CallFailed(Exception):
    """No answer came in time, or the helper has ended; the message says which.

    The memory of a late call's value stays reserved until the answer comes.
    """


class NoSpace(TierError):
    """All memory for values on their way was in use, for as long as this call could wait."""


class BufferSpace:
    """Ranges of a buffer of `size` bytes, which are given out in whole pages, first fit. Several threads call it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: dict[int, int] = {}
        """End of each range in use, by its start."""
        self._changed = threading.Condition()

    def allocate(self, count: int, deadline: float) -> int:
        """Returns the start of `count` free bytes. Raises NoSpace where there are none before `deadline`."""
        with self._changed:
            while (start := self._first_fit(count)) is None:
                if count > self.size or not self._changed.wait(deadline - time.monotonic()):
                    raise NoSpace(f"{count} of the buffer's {self.size} bytes were not free in time")
            self.used[start] = start + -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        return start

    def release(self, start: int) -> None:
        with self._changed:
            del self.used[start]
            self._changed.notify_all()

    def _first_fit(self, count: int) -> int | None:
        free = 0
        for start, end in [*sorted(self.used.items()), (self.size, self.size)]:
            if start - free >= count:
                return free
            free = end
        return None


@dataclass(slots=True)
class BufferRange:
    """A range of the memory that both map; `view` is valid until the end of `reserve`."""

    start: int
    view: memoryview
    late: bool = False
    """True if the helper may still write to it: then the answer releases it."""


@dataclass(slots=True)
class PendingCall:
    """A call whose answer has not come. `codes` is cancelled when the call is late."""

    deadline: float
    value: BufferRange | None
    codes: Future[list[int]] = field(default_factory=Future)


class StoreClient:
    """A client of one helper; when that has ended, another client takes its place. Several threads call it."""

    def __init__(self, address: StoreAddress, on_end: Callable[["StoreClient", str], None]) -> None:
        """Starts the helper, which ends with the thread that calls this.

        `on_end` is called in another thread when it has ended, with the reason. Raises OSError where there can be no helper: this
        machine is out of something.
        """
        self.failure: str | None = None
        """Reason for which the helper has ended."""
        self._on_end = on_end
        self._space = BufferSpace(address.buffer)
        self._lock = threading.Lock()
        """Guards the pending calls."""
        self._pending: dict[int, PendingCall] = {}
        self._numbers = itertools.count()
        self._start(address)

    def _start(self, address: StoreAddress) -> None:
        memory = os.memfd_create("starling-store")
        os.ftruncate(memory, address.buffer)
        self._map = mmap.mmap(memory, address.buffer)
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = theirs.fileno(), memory
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.helper", *map(str, inherited), msgspec.json.encode(address)],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        os.close(memory)
        self._receiver = threading.Thread(target=self._receive_all, name="store-answers", daemon=True)
        self._receiver.start()
        self._watcher = threading.Thread(target=self._watch, name="store-watcher", daemon=True)
        self._watcher.start()

    # ---- calls ----

    @contextmanager
    def reserve(self, size: int, deadline: float) -> Iterator[BufferRange]:
        """Reserves memory for one value, until the end or until a late call has been answered. Raises NoSpace."""
        start = self._space.allocate(size, deadline)
        value = BufferRange(start, memoryview(self._map)[start : start + size])
        try:
            yield value
        finally:
            value.view.release()
            if not value.late:
                self._space.release(start)

    def call(self, what: StoreVerb, keys: list[str], deadline: float, value: BufferRange | None = None) -> list[int]:
        """Returns the code for each key. Raises CallFailed. `deadline` is by the monotonic clock."""
        codes = self._send(what, keys, PendingCall(deadline, value))
        with contextlib.suppress(TimeoutError, CancelledError):
            return codes.result(max(0.0, deadline - time.monotonic()))
        if not codes.cancel():  # the answer has just come
            return codes.result()
        if value is not None:
            value.late = True
        raise CallFailed(f"no answer to {what} in time")

    def _send(self, what: StoreVerb, keys: list[str], pending: PendingCall) -> Future[list[int]]:
        call = StoreCall(next(self._numbers), what, keys)
        if pending.value is not None:
            call.offset, call.size = pending.value.start, len(pending.value.view)
        with self._lock:
            self._pending[call.id] = pending
        try:
            self._link.send(msgspec.msgpack.encode(call), socket.MSG_DONTWAIT)
        except OSError as error:
            with self._lock:
                self._pending.pop(call.id, None)
            raise CallFailed(self.failure or f"the helper takes no calls: {error}") from None
        return pending.codes

    def abandon_calls(self) -> None:
        """Makes all calls without an answer late: nobody waits for them any longer."""
        with self._lock:
            for pending in self._pending.values():
                pending.codes.cancel()

    @property
    def oldest_late(self) -> float:
        """Seconds for which the oldest late call has been going on; 0 where there is none."""
        now = time.monotonic()
        with self._lock:
            return max([0.0, *(now - pending.deadline for pending in self._pending.values())])

    # ---- the process ----

    def close(self, grace: float) -> None:
        """Lets the helper leave the store, and kills it if that takes longer than `grace` seconds; at once for 0."""
        if grace:
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._process.kill()
        self._watcher.join()
        self._link.close()
        with contextlib.suppress(BufferError):  # a caller is still copying: the map goes with its view
            self._map.close()

    @property
    def cpu_seconds(self) -> float:
        """Processor time that the helper has taken so far; 0 when it has ended."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)  # its clock on Linux, see clock_getcpuclockid(3)
        except OSError:
            return 0.0

    def _receive_all(self) -> None:
        decode = msgspec.msgpack.Decoder(StoreAnswer).decode
        with contextlib.suppress(OSError):
            while packet := self._link.recv(PACKET):
                self._on_answer(decode(packet))

    def _on_answer(self, answer: StoreAnswer) -> None:
        with self._lock:
            pending = self._pending.pop(answer.id)
        if pending.codes.set_running_or_notify_cancel():
            pending.codes.set_result(answer.codes)
        elif pending.value is not None:
            self._space.release(pending.value.start)

    def _watch(self) -> None:
        error = self._last_error()
        code = self._process.wait()
        self._receiver.join()
        self.failure = f"the store's library ended with {code}{error}"
        self._fail_calls(self.failure)
        self._on_end(self, self.failure)

    def _last_error(self) -> str:
        """Reads the helper's log to its end, and returns the last line that is an error."""
        line = b""
        assert self._process.stderr is not None
        with self._process.stderr as log:
            for newer in log:
                line = line if _INFORMATIVE.match(newer) else newer.strip()[:200]
        return f": {line.decode(errors='replace')}" if line else ""

    def _fail_calls(self, reason: str) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            if one.codes.set_running_or_notify_cancel():
                one.codes.set_exception(CallFailed(reason))
