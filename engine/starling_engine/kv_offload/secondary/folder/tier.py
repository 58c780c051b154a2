"""The filesystem tier: chunks in a folder, which engines, their restarts and other nodes share.

It is a cache: files are never flushed to the disk, and checksums find what a crash of the machine has torn. Guarantees:
docs/kv-cache.md.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES, EPERM, EROFS
from pathlib import Path
from threading import Lock

from starling_engine.config import DirectIo
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.base import ObjectKey, ObjectMissing, TierCounters, TierError
from starling_engine.kv_offload.secondary.circuit_breaker import CircuitBreaker
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.janitor import FULL, FolderJanitor
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, move_into_place
from starling_engine.kv_offload.secondary.folder.object_file import (
    ObjectDamaged,
    file_bytes,
    read_object,
    supports_direct,
    write_object,
)
from starling_engine.kv_offload.secondary.folder.usage import FolderUsage

logger = logging.getLogger("starling.tiers")

SLOW_READ, SLOW_WRITE = 3.0, 15.0
"""Seconds an operation may take; computing a chunk again takes less."""
WRITE_ERRORS = FULL | {EROFS, EACCES, EPERM}
"""Numbers of errors that a write may meet while reads go on."""


def open_folder(path: str, limit: int, direct: DirectIo, fingerprint: Fingerprint) -> "FolderTier":
    """Opens the tier in the folder `path`, which is made where it is missing; `limit` is in bytes, of all models together.

    Returns within milliseconds: what the folder holds is counted in the background. On a disk that is out of order the tier waits
    until it works again. Raises ConfigError for what can never work.
    """
    root = Path(path).expanduser()
    if limit < 1:
        raise ConfigError(f"must be at least 1, got {limit}", "kv_fs_bytes")
    if os.path.exists(root) and not os.path.isdir(root):  # noqa: PTH110, PTH112 - these never raise
        raise ConfigError(f"{root} is a file, not a folder", "kv_fs_path")
    layout = FolderLayout(root, fingerprint.digest)
    tier = FolderTier(layout, fingerprint, limit, direct == "on")
    try:
        tier.janitor.look()
        tier.direct = _uses_direct(layout, direct)
    except OSError as error:
        tier.breakers.note(error)
    tier.janitor.start()
    return tier


def _uses_direct(layout: FolderLayout, direct: DirectIo) -> bool:
    """Returns whether to use O_DIRECT; "auto" where it is seen to work. Raises ConfigError where "on" does not, OSError."""
    if direct == "off":
        return False
    with layout.new_file() as probe:
        supported = supports_direct(probe)
    if direct == "on" and not supported:
        raise ConfigError(f"the file system of {layout.root} knows no O_DIRECT; possible are auto and off", "kv_fs_direct")
    return supported


class FolderBreakers:
    """Two circuit breakers, as reads go on where only writing fails: a full disk, a read-only one."""

    def __init__(self, root: object, clock: Callable[[], float] = time.monotonic) -> None:
        name = f"the KV cache's folder {root}"
        self.folder = CircuitBreaker(1.0, 60.0, clock, name=name, settles=60.0)
        self.writes = CircuitBreaker(1.0, 60.0, clock, name=f"writing to {name}", settles=60.0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises TierError."""
        with self.writes.attempt(SLOW_WRITE), self.folder.attempt(math.inf, ignored=WRITE_ERRORS):
            yield

    def note(self, error: OSError) -> None:
        """Notes an error in the background, which says nothing about the next try."""
        (self.writes if error.errno in WRITE_ERRORS else self.folder).trip(str(error), tried=False)


class FolderTier:
    """A SecondaryTier. A read or a write is a file opened, one system call, and the file closed."""

    name = "filesystem"
    cpu_elsewhere = 0.0

    def __init__(self, layout: FolderLayout, fingerprint: Fingerprint, limit: int, direct: bool) -> None:
        self._layout, self._fingerprint, self.direct = layout, fingerprint, direct
        self._usage, self.breakers = FolderUsage(limit, layout.writer), FolderBreakers(layout.root)
        self._lock = Lock()
        self._corrupt = 0
        self.janitor = FolderJanitor(layout, self._usage, self.breakers.note)

    @property
    def counters(self) -> TierCounters:
        folder, writes, held = self.breakers.folder, self.breakers.writes, self._usage.now
        errors, refused = folder.failed + writes.failed, folder.refused + writes.refused
        return TierCounters(held.bytes, held.objects, self.janitor.evicted, self._corrupt, errors, refused, self._usage.refused)

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self.breakers.folder.attempt(SLOW_READ):
            found = [os.path.exists(self._layout.path_of(key)) for key in keys]  # noqa: PTH110 - hundreds, of which none needs a Path
            if not any(found):
                self._layout.make()
            return found

    def read(self, key: ObjectKey, into: memoryview) -> None:
        path = Path(self._layout.path_of(key))
        with self.breakers.folder.attempt(SLOW_READ):
            try:
                _mark_used(path, read_object(path, self._fingerprint, key, into.cast("B"), self.direct))
            except FileNotFoundError:
                self._layout.make()
                raise ObjectMissing(f"{path.name} is not there") from None
            except ObjectDamaged as error:
                self._drop(path, error)
                raise ObjectMissing(f"{path.name} {error}") from error

    def write(self, key: ObjectKey, data: memoryview) -> None:
        size = file_bytes(key, data.nbytes)
        placed = False
        if not self._usage.reserve(size):
            self.janitor.wake()
            problem = "is not counted yet" if self._usage.count is None else f"has no room for {size} bytes now"
            raise TierError(f"{self._layout.root} {problem}")
        try:
            with self.breakers.writing():
                placed = self._write_object(Path(self._layout.path_of(key)), key, data.cast("B"))
        finally:
            self._usage.settle(size, placed=placed)
        self.janitor.wake()

    def close(self) -> None:
        self.janitor.stop()

    def _drop(self, path: Path, reason: ObjectDamaged) -> None:
        """Removes a damaged object. Only the first one is logged as a warning; all are counted."""
        logger.log(logging.DEBUG if self._corrupt else logging.WARNING, "%s %s; it is removed and computed again", path, reason)
        with self._lock:
            self._corrupt += 1
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._usage.drop(size)

    def _write_object(self, path: Path, key: ObjectKey, data: memoryview) -> bool:
        """Returns whether the object is new. Raises OSError."""
        if path.exists():
            return False
        with self._layout.new_file() as temporary:
            write_object(temporary, self._fingerprint, key, data, self.direct)
            move_into_place(temporary, path)
        return True


def _mark_used(path: Path, used: float) -> None:
    """Renews the time of use, of which eviction needs the order no finer than minutes."""
    if abs(time.time() - used) > 60:
        with suppress(OSError):  # a read-only disk: the object only goes earlier
            os.utime(path)
