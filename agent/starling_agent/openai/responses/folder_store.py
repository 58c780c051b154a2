"""Responses in a folder that pods share: a file for each, which every pod reads.

    <id>          a digest, and behind it the StoredResponse as msgpack; written beside it first, so it is never half there
    <id>.cancel   asks the pod that makes the response to cancel it

While a response runs its pod touches its file every second. A file that says so and was not touched for LOST_SECONDS is of a pod
that is gone.
"""

import errno
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from starling_engine.errors import ConfigError

from starling_agent.openai.responses.disk_threads import DiskThreads
from starling_agent.openai.responses.ids import is_response_id
from starling_agent.openai.responses.store import ResponseStore, StoredResponse, StoreLimits, lost

LOST_SECONDS = 60.0
"""More than clocks of two machines differ."""
SWEEP_SECONDS = 60.0
SWEEP_PART = 16
"""A pod looks for what is too much after it has written this part of the room, or after SWEEP_SECONDS with its next response."""
FULL_SWEEP_SECONDS = 10.0
"""A full disk may be so by files of others: what is tried again each second does not empty the folder."""
LITTER_SECONDS = 600.0
CANCEL, PART = ".cancel", ".starling-part-"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DIGEST_BYTES = 16
THREADS = 4
log = structlog.get_logger("starling.responses")


class FileStamp(NamedTuple):
    """A file in the folder: when it was written, in seconds since 1970, its bytes and its name."""

    written: float
    size: int
    name: str


def is_marker(name: str) -> bool:
    """Says if a file asks for a cancellation."""
    return name.endswith(CANCEL) and is_response_id(name.removesuffix(CANCEL))


def room_of_full_disk(files: Iterable[FileStamp], limits: StoreLimits) -> StoreLimits:
    """Returns limits that leave the disk a part of what the responses use now."""
    used = sum(file.size for file in files if is_response_id(file.name))
    return replace(limits, max_bytes=min(limits.max_bytes, used - used // SWEEP_PART))


def surplus(files: Iterable[FileStamp], now: float, limits: StoreLimits) -> list[str]:
    """Returns the names of files that have to go: responses that are too old, the oldest beyond the room, and our litter."""
    room, names = limits.max_bytes, []
    for file in sorted(files, reverse=True):
        if is_response_id(file.name):
            room -= file.size
            if room < 0 or now - file.written > limits.max_seconds:
                names.append(file.name)
        elif (is_marker(file.name) or file.name.startswith(PART)) and now - file.written > LITTER_SECONDS:
            names.append(file.name)
    return names


class FolderStore(ResponseStore):
    """All pods that have the folder hold to its limits, each by what it sees of it now and then."""

    is_shared = True

    def __init__(self, folder: Path, limits: StoreLimits, pod: str = "") -> None:
        """Raises ConfigError for a folder that cannot be written."""
        super().__init__(limits, pod)
        self._folder = folder
        # Threads of its own: a disk that hangs makes only responses wait. What is written first is there first.
        self._threads, self._writer = DiskThreads(THREADS, "responses"), DiskThreads(1, "responses-writer")
        self._unswept_bytes = 0
        self._swept_at = float("-inf")
        self._sweep_made: Future[None] | None = None
        self._is_full = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=PART):
                pass
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}", "response_store") from None

    async def put(self, response_id: str, stored: StoredResponse) -> None:
        await self._written(lambda: self._write(self._path(response_id), stored))

    async def update(self, response_id: str, stored: StoredResponse) -> None:
        await self._written(lambda: self._replace(self._path(response_id), stored))

    async def keep(self, response_id: str) -> bool:
        try:
            return await self._threads.run(lambda: _touch(self._path(response_id)))
        except OSError as error:
            log.error("a running response cannot be kept", id=response_id, cause=str(error))
            return False

    async def ask_to_cancel(self, response_id: str) -> None:
        await self._threads.run(lambda: _marker(self._path(response_id)).touch())

    async def _find(self, response_id: str) -> StoredResponse | None:
        if not is_response_id(response_id):
            return None
        return await self._threads.run(lambda: self._read(self._path(response_id)))

    async def _forget(self, response_id: str) -> None:
        await self._writer.run(lambda: self._path(response_id).unlink(missing_ok=True))

    async def _written(self, write: Callable[[], None]) -> None:
        try:
            await self._writer.run(write)
            self._is_full = False
        except OSError as error:
            self._is_full = error.errno in NO_SPACE
            raise
        finally:
            self._sweep_now_and_then()

    def _sweep_now_and_then(self) -> None:
        seconds = FULL_SWEEP_SECONDS if self._is_full else SWEEP_SECONDS
        is_due = self._unswept_bytes * SWEEP_PART > self._limits.max_bytes or time.monotonic() - self._swept_at > seconds
        if is_due and (self._sweep_made is None or self._sweep_made.done()):
            self._unswept_bytes, self._swept_at = 0, time.monotonic()
            # Nobody waits for a walk through the folder.
            self._sweep_made = self._threads.submit(partial(self._sweep, self._is_full))

    # ---- in a thread ----

    def _path(self, response_id: str) -> Path:
        assert is_response_id(response_id)
        return self._folder / response_id

    def _write(self, path: Path, stored: StoredResponse, *, only_over: bool = False) -> None:
        """Writes a response; with `only_over` only where there is one. Another pod may delete it meanwhile."""
        content = msgspec.msgpack.encode(stored)
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=PART, delete=False) as file:
            try:
                file.write(_digest(content) + content)
                file.close()
                if only_over and not path.exists():
                    Path(file.name).unlink()
                    return
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        self._unswept_bytes += len(content)

    def _replace(self, path: Path, stored: StoredResponse) -> None:
        if path.exists():
            self._write(path, stored, only_over=True)
        if not stored.is_running:
            _marker(path).unlink(missing_ok=True)

    def _read(self, path: Path) -> StoredResponse | None:
        try:
            age = time.time() - path.stat().st_mtime
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        stored = _decoded(data)
        if stored is None:
            log.error("a stored response is damaged", file=path.name)
            return None
        if age > self._limits.max_seconds:
            return None
        return lost(stored) if stored.is_running and age > LOST_SECONDS else stored

    def _sweep(self, is_full: bool) -> None:
        try:
            files, limits = list(_files(self._folder)), self._limits
            if is_full:
                limits = room_of_full_disk(files, limits)
            for name in surplus(files, time.time(), limits):
                (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            log.error("old responses cannot be removed", cause=str(error))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _decoded(data: bytes) -> StoredResponse | None:
    """Returns a file's response; None for one that is damaged, or of a release that wrote others."""
    digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(content):
        return None
    try:
        return msgspec.msgpack.decode(content, type=StoredResponse)
    except msgspec.MsgspecError:
        return None


def _marker(path: Path) -> Path:
    return path.with_name(path.name + CANCEL)


def _touch(path: Path) -> bool:
    try:
        os.utime(path)
        return _marker(path).exists()
    except FileNotFoundError:
        return path.parent.exists()  # a folder that is gone says nothing of the response


def _files(folder: Path) -> Iterable[FileStamp]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another pod has removed it
                stat = entry.stat()
                yield FileStamp(stat.st_mtime, stat.st_size, entry.name)
