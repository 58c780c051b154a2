"""The process in which the store's library runs: `python -m` this module with SOCKET and MEMORY, two file descriptors.

Values are in memory that the engine maps too, so only their places go over the socket. Reads, writes and the rest have a thread
each, that makes one call of the library of all that waits: batches are twice as fast as the same calls from several threads.
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
from starling_engine.kv_offload.secondary.store.address import bracketed, own_host
from starling_engine.kv_offload.secondary.store.messages import (
    LATE,
    PACKET,
    FromHelper,
    Imported,
    Setup,
    StoreAnswer,
    StoreCall,
    StoreFailed,
    StoreReady,
    ToHelper,
    Unusable,
)
from starling_engine.platforms.priority import lower_priority

BATCH = 32
"""Calls made as one. More would keep the first of them waiting."""
LIBRARY_BUFFER = 16 << 20
"""Bytes that the library wants for calls that bring no memory of their own, of which there are none here."""
MASTER_POLL = 0.2
CLOSE_SECONDS = 3.0


class Helper:
    def __init__(self, link: socket.socket, setup: Setup, memory: mmap.mmap) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._link = link
        self._setup = setup
        self._size = len(memory)
        self._memory = ctypes.c_char.from_buffer(memory)  # held: the map must outlive the library
        self._base = ctypes.addressof(self._memory)
        self._store: Any = MooncakeDistributedStore()
        self._encode = msgspec.msgpack.Encoder().encode
        self._lanes: dict[str, queue.SimpleQueue[StoreCall]] = {}

    def send(self, message: FromHelper) -> None:
        self._link.send(self._encode(message))

    def set_up(self) -> None:
        """Waits until there is a master: the library, by itself, would go on trying for a minute and a half."""
        setup = self._setup
        self._await_master()
        host = setup.host or own_host(setup.master, setup.port)
        code = self._store.setup(
            host, setup.metadata, setup.segment, LIBRARY_BUFFER, "tcp", "", f"{bracketed(setup.master)}:{setup.port}"
        ) or self._store.register_buffer(self._base, self._size)
        if code:
            self.send(StoreFailed(f"it answers {code} to a new client"))
            return
        rest = self._lane(self._rest)
        self._lanes = {"get": self._lane(self._get), "put": self._lane(self._put, nice=True), "find": rest, "drop": rest}
        self.send(StoreReady())

    def _await_master(self) -> None:
        while not self._is_master_there():
            time.sleep(MASTER_POLL)

    def _is_master_there(self) -> bool:
        try:
            socket.create_connection((self._setup.master, self._setup.port), timeout=MASTER_POLL).close()
        except OSError:
            return False
        return True

    def take(self, call: StoreCall) -> None:
        self._lanes[call.what].put(call)

    def _lane(self, run: Callable[[list[StoreCall]], list[list[int]]], *, nice: bool = False) -> "queue.SimpleQueue[StoreCall]":
        waiting: queue.SimpleQueue[StoreCall] = queue.SimpleQueue()

        def work() -> None:
            if nice:
                lower_priority()
            while True:
                calls = [waiting.get()]
                while len(calls) < BATCH and not waiting.empty():
                    calls.append(waiting.get())
                now = time.monotonic()
                live = [call for call in calls if call.deadline > now]
                for call in calls:
                    if call.deadline <= now:
                        self.send(StoreAnswer(call.id, [LATE] * len(call.keys)))
                for call, codes in zip(live, run(live) if live else [], strict=True):
                    self.send(StoreAnswer(call.id, codes))

        threading.Thread(target=work, daemon=True).start()
        return waiting

    def _get(self, calls: list[StoreCall]) -> list[list[int]]:
        return [[code] for code in self._store.batch_get_into(*self._places(calls))]

    def _put(self, calls: list[StoreCall]) -> list[list[int]]:
        return [[code] for code in self._store.batch_put_from(*self._places(calls))]

    def _places(self, calls: list[StoreCall]) -> tuple[list[str], list[int], list[int]]:
        return [c.keys[0] for c in calls], [self._base + c.offset for c in calls], [c.size for c in calls]

    def _rest(self, calls: list[StoreCall]) -> list[list[int]]:
        forced = True  # also while a reader holds it: nobody has use for a damaged value
        return [
            self._store.batch_is_exist(call.keys) if call.what == "find" else [self._store.remove(key, forced) for key in call.keys]
            for call in calls
        ]

    def close(self) -> None:
        """Takes this client's memory out of the store, so that nobody looks for it there."""
        if self._lanes and self._is_master_there():
            self._store.close()


def main() -> None:
    die_with_parent()
    threading.excepthook = _end
    link = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.msgpack.decode(link.recv(PACKET), type=Setup)
    try:
        helper = Helper(link, setup, mmap.mmap(int(sys.argv[2]), setup.memory))
    except ImportError as error:
        link.send(msgspec.msgpack.encode(Unusable(str(error))))
        return
    helper.send(Imported())
    threading.Thread(target=helper.set_up, daemon=True).start()
    decode = msgspec.msgpack.Decoder(ToHelper).decode
    while packet := link.recv(PACKET):
        call = decode(packet)
        assert isinstance(call, StoreCall)
        helper.take(call)
    closing = threading.Thread(target=helper.close, daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)
    os._exit(0)  # threads of the library may hang


def _end(what: threading.ExceptHookArgs) -> None:
    print(f"{what.exc_type.__name__}: {what.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
