"""The process in which the store's library runs: `python -m` this module with SOCKET and MEMORY, two file descriptors.

Values are in memory that the engine maps, too, so only their offsets go over the socket. Gets, puts and other calls have a thread
each, which makes one call of the library of all that wait: batches are twice as fast as the same calls from several threads.
"""

import ctypes
import mmap
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from starling_engine.ipc.child import die_with_parent
from starling_engine.kv_offload.secondary.store.address import bracketed, local_host
from starling_engine.kv_offload.secondary.store.messages import (
    PACKET,
    Code,
    FromHelper,
    Imported,
    Setup,
    StoreAnswer,
    StoreCall,
    StoreJoined,
    ToHelper,
)
from starling_engine.platforms.priority import lower_priority


class Helper:
    def __init__(self, link: socket.socket, setup: Setup, memory: mmap.mmap) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._link = link
        self._setup = setup
        self._size = len(memory)
        self._memory = ctypes.c_char.from_buffer(memory)  # a reference: the map must outlive the library
        self._base = ctypes.addressof(self._memory)
        self._store: Any = MooncakeDistributedStore()
        self._encode = msgspec.msgpack.Encoder().encode
        self._queues: dict[str, queue.SimpleQueue[StoreCall]] = {}

    def send(self, message: FromHelper) -> None:
        self._link.send(self._encode(message))

    def set_up(self, library_buffer: int = 16 << 20) -> None:
        """Joins the store when there is a master: the library, by itself, would go on trying for a minute and a half.

        The library wants `library_buffer` bytes for calls that bring no memory of their own, of which there are none here.
        """
        setup = self._setup
        while not self._is_master_there():
            time.sleep(0.2)
        host = setup.host or local_host(setup.master, setup.port)
        code = self._store.setup(
            host, setup.metadata, setup.segment, library_buffer, "tcp", "", f"{bracketed(setup.master)}:{setup.port}"
        ) or self._store.register_buffer(self._base, self._size)
        if code:
            self.send(StoreJoined(f"it answers {code} to a new client"))
            return
        other = self._start_queue(self._find_or_drop)
        puts = self._start_queue(self._put, low_priority=True)
        self._queues = {"get": self._start_queue(self._get), "put": puts, "find": other, "drop": other}
        self.send(StoreJoined())

    def _is_master_there(self) -> bool:
        try:
            socket.create_connection((self._setup.master, self._setup.port), timeout=0.2).close()
        except OSError:
            return False
        return True

    def on_call(self, call: StoreCall) -> None:
        self._queues[call.what].put(call)

    def _start_queue(
        self, run: Callable[[list[StoreCall]], list[list[int]]], *, low_priority: bool = False, batch: int = 32
    ) -> "queue.SimpleQueue[StoreCall]":
        """Starts a thread for a queue of calls. A larger batch would keep the first of its calls waiting."""
        waiting: queue.SimpleQueue[StoreCall] = queue.SimpleQueue()

        def work() -> None:
            if low_priority:
                lower_priority()
            while True:
                calls = [waiting.get()]
                while len(calls) < batch and not waiting.empty():
                    calls.append(waiting.get())
                now = time.monotonic()
                live = [call for call in calls if call.deadline > now]
                for call in calls:
                    if call.deadline <= now:
                        self.send(StoreAnswer(call.id, [Code.LATE for _ in call.keys]))
                for call, codes in zip(live, run(live) if live else [], strict=True):
                    self.send(StoreAnswer(call.id, codes))

        threading.Thread(target=work, daemon=True).start()
        return waiting

    def _get(self, calls: list[StoreCall]) -> list[list[int]]:
        return [[code] for code in self._store.batch_get_into(*self._ranges(calls))]

    def _put(self, calls: list[StoreCall]) -> list[list[int]]:
        return [[code] for code in self._store.batch_put_from(*self._ranges(calls))]

    def _ranges(self, calls: list[StoreCall]) -> tuple[list[str], list[int], list[int]]:
        return [c.keys[0] for c in calls], [self._base + c.offset for c in calls], [c.size for c in calls]

    def _find_or_drop(self, calls: list[StoreCall]) -> list[list[int]]:
        forced = True  # also while somebody reads it: a damaged value is useless
        return [
            self._store.batch_is_exist(call.keys) if call.what == "find" else [self._store.remove(key, forced) for key in call.keys]
            for call in calls
        ]

    def close(self) -> None:
        """Takes this client's memory out of the store, so that nobody looks for it there."""
        if self._queues and self._is_master_there():
            self._store.close()


def main() -> None:
    die_with_parent()
    threading.excepthook = _end
    link = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.msgpack.decode(link.recv(PACKET), type=Setup)
    try:
        helper = Helper(link, setup, mmap.mmap(int(sys.argv[2]), setup.memory))
    except ImportError as error:
        link.send(msgspec.msgpack.encode(Imported(str(error))))
        return
    helper.send(Imported())
    threading.Thread(target=helper.set_up, daemon=True).start()
    decode = msgspec.msgpack.Decoder(ToHelper).decode
    while packet := link.recv(PACKET):
        call = decode(packet)
        assert isinstance(call, StoreCall)
        helper.on_call(call)
    closing = threading.Thread(target=helper.close, daemon=True)
    closing.start()
    closing.join(3.0)
    os._exit(0)  # threads of the library may hang


def _end(failure: threading.ExceptHookArgs) -> None:
    print(f"{failure.exc_type.__name__}: {failure.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
