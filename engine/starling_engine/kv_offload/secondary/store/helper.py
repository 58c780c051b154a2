"""The process in which the store's library runs: `python -m` this module with SOCKET, MEMORY and the address of the store in JSON.

Calls and answers are msgpack in packets of the socket, a Unix one. Values are in memory that the engine maps, too, so only their
offsets go over it. Gets, puts and other calls have a thread each, which makes one call of the library of all that wait: batches are
twice as fast as the same calls from several threads.
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
from enum import IntEnum
from functools import partial
from typing import Any, Literal

import msgspec

from starling_engine.ipc.child import die_with_parent
from starling_engine.ipc.priority import lower_priority
from starling_engine.kv_offload.secondary.store.address import StoreAddress

PACKET = 1 << 17
"""Bytes of the largest packet; less than what a socket's buffer takes at least."""
StoreVerb = Literal["join", "find", "get", "put", "drop"]


class Code(IntEnum):
    """Answers of the library below 0."""

    NO_ROOM = -200
    TOO_LARGE = -600
    """The value in the store is larger than the buffer for it."""
    NOT_FOUND = -704
    MASTER_UNREACHABLE = -900


class StoreCall(msgspec.Struct):
    """A call to the store; the first one is "join". A "get" or "put" has one key, and `size` bytes from `offset` of the memory."""

    id: int
    what: StoreVerb
    keys: list[str]
    offset: int = 0
    size: int = 0


class StoreAnswer(msgspec.Struct):
    """A code for each key: 1 or 0 of "find", the bytes read of "get", 0 of others; a `Code` for an error."""

    id: int
    codes: list[int]


Calls = queue.SimpleQueue[StoreCall]
Run = Callable[[list[StoreCall]], list[list[int]]]
"""Makes calls, and returns the codes of each."""


class Helper:
    def __init__(self, link: socket.socket, address: StoreAddress, memory: mmap.mmap) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._link, self._address = link, address
        self._memory = ctypes.c_char.from_buffer(memory)  # a reference: the map must outlive the library
        self._base = ctypes.addressof(self._memory)
        self._store: Any = MooncakeDistributedStore()
        self._joined = False

    def serve(self) -> None:
        """Answers calls until the engine ends the socket. Then this client's memory leaves the store: nobody looks for it there."""
        others = self._start(self._run_each)
        gets = self._start(partial(self._move, self._store.batch_get_into))
        puts = self._start(partial(self._move, self._store.batch_put_from), low_priority=True)
        queues = {"get": gets, "put": puts}
        decode = msgspec.msgpack.Decoder(StoreCall).decode
        while packet := self._link.recv(PACKET):
            call = decode(packet)
            queues.get(call.what, others).put(call)
        self._store.close()

    def _start(self, run: Run, *, low_priority: bool = False) -> Calls:
        """Starts a thread that answers the calls of a queue."""
        calls = Calls()

        def work() -> None:
            if low_priority:
                lower_priority()
            while True:
                self._answer(_next_batch(calls), run)

        threading.Thread(target=work, daemon=True).start()
        return calls

    def _answer(self, calls: list[StoreCall], run: Run) -> None:
        for call, codes in zip(calls, run(calls), strict=True):
            self._link.send(msgspec.msgpack.encode(StoreAnswer(call.id, codes)))

    # ---- calls of the library ----

    def _move(self, function: Callable[[list[str], list[int], list[int]], list[int]], calls: list[StoreCall]) -> list[list[int]]:
        """Gets or puts one value a call."""
        addresses = [self._base + call.offset for call in calls]
        return [[code] for code in function([call.keys[0] for call in calls], addresses, [call.size for call in calls])]

    def _run_each(self, calls: list[StoreCall]) -> list[list[int]]:
        functions = {"join": self._join, "find": self._store.batch_is_exist, "drop": self._drop}
        return [functions[call.what](call.keys) for call in calls]

    def _join(self, keys: list[str]) -> list[int]:
        """Joins the store when there is a master: the library, by itself, would go on trying for a minute and a half."""
        if not self._joined:
            while (host := _local_host(self._address.master, self._address.port)) is None:
                time.sleep(0.2)
            self._set_up(self._address.host or host)
            self._joined = True
        return [0 for _ in keys]

    def _set_up(self, host: str, library_buffer: int = 16 << 20) -> None:
        """The library wants `library_buffer` bytes for calls that bring no memory of their own, of which there are none here."""
        address = self._address
        code = self._store.setup(host, address.metadata, address.segment, library_buffer, "tcp", "", str(address))
        code = code or self._store.register_buffer(self._base, address.buffer)
        if code:
            raise OSError(f"the store answers {code} to a new client")

    def _drop(self, keys: list[str]) -> list[int]:
        forced = True  # also while somebody reads it: a damaged value is useless
        return [self._store.remove(key, forced) for key in keys]


def _next_batch(calls: Calls, most: int = 32) -> list[StoreCall]:
    """Waits for a call, and takes those that are there with it. A larger batch would keep the first of them waiting."""
    batch = [calls.get()]
    while len(batch) < most and not calls.empty():
        batch.append(calls.get())
    return batch


def _local_host(master: str, port: int) -> str | None:
    """Returns the address from which this machine reaches the master; None while that is not there."""
    try:
        with socket.create_connection((master, port), timeout=0.2) as link:
            return str(link.getsockname()[0])
    except OSError:
        return None


def _end(failure: threading.ExceptHookArgs) -> None:
    """Ends the process with one of its threads."""
    print(f"{failure.exc_type.__name__}: {failure.exc_value}", file=sys.stderr, flush=True)
    os._exit(1)


def main() -> None:
    die_with_parent()
    threading.excepthook = _end
    address = msgspec.json.decode(sys.argv[3], type=StoreAddress)
    Helper(socket.socket(fileno=int(sys.argv[1])), address, mmap.mmap(int(sys.argv[2]), address.buffer)).serve()
    os._exit(0)  # threads of the library may hang


if __name__ == "__main__":
    main()
