"""The engine's side of a helper process: memory that both map, calls with a time limit, and answers by their number."""

import bisect
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
    StoreJoined,
)

_decode = msgspec.msgpack.Decoder(FromHelper).decode


class CallLate(Exception):
    """No answer came in time. The memory of the call's value stays reserved until the answer comes."""


class HelperGone(Exception):
    """The helper has ended, or takes no more calls; the message says why."""


class NoSpace(Exception):
    """All memory for values on their way was in use, for as long as this call could wait."""


class BufferSpace:
    """Free ranges of a buffer of `size` bytes, which are given out in whole pages, first fit. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        """(start, end), sorted, none next to another."""

    def allocate(self, count: int) -> int | None:
        """Returns the start of `count` free bytes; None where no range has as many."""
        count = self._whole_pages(count)
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                self._free[index : index + 1] = [(start + count, end)] if end - start > count else []
                return start
        return None

    def release(self, start: int, count: int) -> None:
        """Takes back what `allocate(count)` returned."""
        end = start + self._whole_pages(count)
        at = bisect.bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    @staticmethod
    def _whole_pages(count: int) -> int:
        return -(-count // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(slots=True)
class BufferRange:
    """A range of the memory that both map; `view` is valid until the end of `reserve`."""

    start: int
    size: int
    view: memoryview
    abandoned: bool = False


@dataclass(slots=True)
class PendingCall:
    call: StoreCall
    value: BufferRange | None
    answered: threading.Event = field(default_factory=threading.Event)
    codes: list[int] | None = None


class StoreClient:
    """A client of one helper; when that has ended, another client takes its place. Several threads call it."""

    def __init__(self, address: StoreAddress, on_end: Callable[[], None]) -> None:
        """Starts the helper, which ends with the thread that calls this. `on_end` is called in another thread when it has ended.

        Raises OSError where there can be no helper: this machine is out of something.
        """
        self.imported = threading.Event()
        self.unusable: str | None = None
        """Reason for which the library cannot be loaded on this machine; known when `imported` is set."""
        self.joined = threading.Event()
        self.failure: str | None = None
        """Reason for which the helper does not work, or has ended; known when `joined` is set, or later."""
        self._on_end = on_end
        self._space = BufferSpace(address.buffer)
        self._changed = threading.Condition()
        """Guards the space and the pending calls; notified when there is more space."""
        self._pending: dict[int, PendingCall] = {}
        self._numbers = itertools.count()
        self._encode = msgspec.msgpack.Encoder().encode
        self._start(address)

    def _start(self, address: StoreAddress) -> None:
        memory = os.memfd_create("starling-store")
        os.ftruncate(memory, address.buffer)
        self._map = mmap.mmap(memory, address.buffer)
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
        self._last_line: deque[str] = deque(maxlen=1)
        assert self._process.stderr is not None
        setup = Setup(address.host, address.metadata, address.segment, address.buffer, address.master, address.port)
        with contextlib.suppress(OSError):  # it has ended already, which the receiver finds
            self._link.send(self._encode(setup))
        self._receiver = threading.Thread(target=self._receive_all, name="store-answers", daemon=True)
        self._log_reader = threading.Thread(target=self._read_log, args=(self._process.stderr,), name="store-log", daemon=True)
        self._log_reader.start()
        self._receiver.start()

    # ---- calls ----

    @contextmanager
    def reserve(self, size: int, deadline: float) -> Iterator[BufferRange]:
        """Reserves memory for one value, until the end or until a late call has been answered. Raises NoSpace."""
        with self._changed:
            while (start := self._space.allocate(size)) is None:
                if size > self._space.size or not self._changed.wait(deadline - time.monotonic()):
                    raise NoSpace(f"{size} bytes wanted, {self._space.num_free} of {self._space.size} free")
        value = BufferRange(start, size, memoryview(self._map)[start : start + size])
        try:
            yield value
        finally:
            value.view.release()
            if not value.abandoned:
                self._release(value)

    def _release(self, value: BufferRange) -> None:
        with self._changed:
            self._space.release(value.start, value.size)
            self._changed.notify_all()

    def call(
        self, what: Literal["find", "get", "put", "drop"], keys: list[str], deadline: float, value: BufferRange | None = None
    ) -> list[int]:
        """Returns the code for each key. Raises CallLate or HelperGone. `deadline` is by the monotonic clock."""
        call = StoreCall(next(self._numbers), what, keys, deadline)
        if value is not None:
            call.offset, call.size = value.start, value.size
        pending = PendingCall(call, value)
        with self._changed:
            self._pending[call.id] = pending
        try:
            self._link.send(self._encode(call), socket.MSG_DONTWAIT)
        except OSError as error:
            with self._changed:
                self._pending.pop(call.id, None)
            raise HelperGone(self.failure or f"it takes no calls: {error}") from None
        pending.answered.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            if pending.codes is not None:
                return pending.codes
            if self.failure is not None:
                raise HelperGone(self.failure)
            if value is not None:
                value.abandoned = True
        raise CallLate(f"no answer to {what} in time")

    def abandon_calls(self) -> None:
        """Makes all calls without an answer late: nobody waits for them any longer."""
        with self._changed:
            for pending in self._pending.values():
                pending.answered.set()

    @property
    def oldest_late(self) -> float | None:
        """Seconds for which the oldest late call has been going on; None where there is none."""
        now = time.monotonic()
        with self._changed:
            late = [now - pending.call.deadline for pending in self._pending.values() if pending.call.deadline < now]
        return max(late, default=None)

    # ---- the process ----

    def close(self, grace: float) -> None:
        """Lets the helper leave the store, and kills it if that takes longer than `grace` seconds; at once for 0."""
        if not grace:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(grace or None)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._receiver.join()
        self._log_reader.join()
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
            return time.clock_gettime(~self._process.pid << 3 | 2)  # its clock on Linux, see clock_getcpuclockid(3)
        except OSError:
            return 0.0

    def _receive_all(self) -> None:
        while packet := self._receive():
            match _decode(packet):
                case StoreAnswer(number, codes):
                    self._on_answer(number, codes)
                case Imported(error):
                    self.unusable = error
                    self.imported.set()
                case StoreJoined(error):
                    self.failure = error
                    self.joined.set()
        self._on_process_end()

    def _receive(self) -> bytes:
        try:
            return self._link.recv(PACKET)
        except OSError:
            return b""

    def _on_answer(self, number: int, codes: list[int]) -> None:
        with self._changed:
            # The caller decides under the same lock: it has seen the answer, or has left the value to this thread.
            pending = self._pending.pop(number)
            pending.codes = codes
            value = pending.value
            abandoned = value is not None and value.abandoned
        pending.answered.set()
        if abandoned and value is not None:
            self._release(value)

    def _on_process_end(self) -> None:
        code = self._process.wait()
        self._log_reader.join()
        error = f": {self._last_line[0]}" if self._last_line else ""
        self.failure = self.failure or f"the store's library ended with {code}{error}"
        with self._changed:
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.answered.set()
        self.imported.set()
        self.joined.set()
        self._on_end()

    def _read_log(self, stderr: IO[bytes]) -> None:
        informative = re.compile(rb"[IW]\d{4} ")  # glog's lines that are no errors: the library does not heed glog's own setting
        with stderr:
            for line in stderr:
                if not informative.match(line):
                    self._last_line.append(line.decode(errors="replace").strip()[:200])
