"""Calls of a disk that hangs: a FIFO that nobody writes to holds whoever opens it, as such a disk does."""

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from starling_agent.openai.responses import disk_threads
from starling_agent.openai.responses.disk_threads import DiskThreads

from tests.waiting import until

END = """
import asyncio, sys, pathlib
from starling_agent.openai.responses import disk_threads
disk_threads.DISK_SECONDS = 0.1
threads = disk_threads.DiskThreads(2, "disk")
try:
    asyncio.run(threads.run(pathlib.Path(sys.argv[1]).read_bytes))
except OSError as error:
    print(error)
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    yield path
    release(path)


def release(fifo: Path) -> None:
    """Lets all who hang in it read its end; unlike a writer's opening it waits for no reader."""
    os.close(os.open(fifo, os.O_RDWR | os.O_NONBLOCK))


class Hanging:
    """A call that hangs in a FIFO, and says when it has begun."""

    def __init__(self, fifo: Path) -> None:
        self._fifo = fifo
        self.begun = Event()

    def __call__(self) -> bytes:
        self.begun.set()
        return self._fifo.read_bytes()

    async def begins(self) -> None:
        async def begun() -> bool:
            return self.begun.is_set()

        await until(begun, "the call to begin")

    async def is_late(self) -> None:
        """Waits until the call should have been over."""
        await self.begins()
        await asyncio.sleep(2 * disk_threads.DISK_SECONDS)


async def free(threads: DiskThreads, fifo: Path) -> None:
    """Waits until the threads that hang are back."""

    async def answers() -> bool:
        release(fifo)
        with contextlib.suppress(TimeoutError):
            return await threads.run(lambda: 7) == 7
        return False

    await until(answers, "the threads to be free")


async def test_what_a_call_returns_and_raises(tmp_path):
    threads = DiskThreads(1, "disk")
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        await threads.run((tmp_path / "none").read_bytes)
    order: list[int] = []
    await asyncio.gather(*(threads.run(lambda i=i: order.append(i)) for i in range(50)))
    assert order == list(range(50)), "one thread keeps the order"


async def test_a_call_that_hangs_holds_its_thread_alone(fifo, monkeypatch):
    threads = DiskThreads(2, "disk")
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 0.1)
    with pytest.raises(OSError, match=r"has not answered within 0.1 seconds"):
        await threads.run(fifo.read_bytes)
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 60.0)
    assert await threads.run(lambda: 7) == 7, "the other thread"
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 0.1)
    second = Hanging(fifo)
    with pytest.raises(TimeoutError):
        await threads.run(second)
    await second.is_late()
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 60.0)
    made: list[int] = []
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError):
            await threads.run(lambda: made.append(1))
    await free(threads, fifo)
    assert not made, "what was refused is not made later"


async def test_hanging_calls_that_nobody_waits_for_count(fifo, monkeypatch):
    threads = DiskThreads(2, "disk")
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 0.1)
    left, unawaited = Hanging(fifo), Hanging(fifo)
    caller = asyncio.create_task(threads.run(left))
    await left.begins()
    caller.cancel()
    threads.submit(unawaited)
    await unawaited.is_late()
    await asyncio.gather(caller, return_exceptions=True)
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 60.0)
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError):
            await threads.run(lambda: 7)
    await free(threads, fifo)


async def test_the_disk_s_own_error_shows():
    def fails() -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    with pytest.raises(OSError, match="Connection timed out"):
        await DiskThreads(1, "disk").run(fails)


async def test_what_waits_for_a_thread_too_long_is_not_made(fifo, monkeypatch):
    threads = DiskThreads(1, "disk")
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 0.1)
    made: list[int] = []
    calls = (threads.run(fifo.read_bytes), threads.run(lambda: made.append(1)))
    assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [TimeoutError, TimeoutError]
    monkeypatch.setattr(disk_threads, "DISK_SECONDS", 10.0)
    await free(threads, fifo)
    assert not made


def test_the_process_ends_although_a_thread_hangs(fifo):
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", END, str(fifo)], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout == "the disk has not answered within 0.1 seconds\n"
    assert time.monotonic() - began < 25
