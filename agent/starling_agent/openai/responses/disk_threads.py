"""Threads for the calls of a disk that may hang: who waits for one is told so in time, and the process ends without them."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

DISK_SECONDS = 10.0
"""Time that a call has, with its wait for a thread."""
T = TypeVar("T")


class DiskThreads:
    """Makes calls in daemon threads, which those of an executor are not; with one thread in the order in which they come.

    A thread that hangs stays in its call. While all do, calls are refused at once: neither they nor what they hold pile up.
    """

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._due = [math.inf] * count
        """The time by which the call of each thread should be over, whoever waits for it."""
        for at in range(count):
            Thread(target=self._work, args=(at,), name=name, daemon=True).start()

    async def run(self, call: Callable[[], T]) -> T:
        """Returns what a call returns, or raises what it raises. Raises TimeoutError, an OSError, for a disk that hangs."""
        if max(self._due) < time.monotonic():
            raise _hangs()
        made = asyncio.wrap_future(self.submit(call))
        try:
            await asyncio.wait((made,), timeout=DISK_SECONDS)
            if not made.done():
                raise _hangs()
            return made.result()
        finally:
            made.cancel()  # a call that still waits for a thread is not made

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes a call that nobody waits for."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _work(self, at: int) -> None:
        while True:
            future, call = self._calls.get()
            self._due[at] = time.monotonic() + DISK_SECONDS
            self._make(future, call)
            self._due[at] = math.inf

    @staticmethod
    def _make(future: Future[T], call: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
            future.set_exception(error)


def _hangs() -> TimeoutError:
    return TimeoutError(f"the disk has not answered within {DISK_SECONDS:g} seconds")
