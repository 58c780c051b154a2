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

from starling_engine.config import Direct
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.secondary.base import ObjectKey, ObjectMissing, TierCounters, TierError
from starling_engine.kv_offload.secondary.circuit_breaker import CircuitBreaker
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.janitor import FULL, FolderJanitor
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, move_into_place, this_process
from starling_engine.kv_offload.secondary.folder.object_file import (
    ObjectDamaged,
    buffer,
    check_object,
    decode_header,
    encode_header,
    header_bytes,
    layers_of,
    make_header,
    pages,
    read_file,
    supports_direct,
    write_file,
)
from starling_engine.kv_offload.secondary.folder.usage import Amount, FolderUsage

logger = logging.getLogger("starling.tiers")

SLOW_READ, SLOW_WRITE = 3.0, 15.0
"""Seconds an operation may take; computing a chunk again takes less."""
WRITE_ERRORS = FULL | {EROFS, EACCES, EPERM}
"""Numbers of errors that a write may meet while reads go on."""


def open_folder(path: str, limit: int, direct: Direct, fingerprint: Fingerprint) -> "FolderTier":
    """Opens the tier in the folder `path`, which is made where it is missing; `limit` is in bytes, of all models together.

    Returns within milliseconds: what the folder holds is counted in the background. On a disk that is out of order the tier waits
    until it works again. Raises ConfigError for what can never work.
    """
    root = Path(path).expanduser()
    if limit < 1:
        raise ConfigError(f"must be at least 1, got {limit}", "kv_fs_bytes")
    if os.path.exists(root) and not os.path.isdir(root):  # noqa: PTH110, PTH112 - these never raise
        raise ConfigError(f"{root} is a file, not a folder", "kv_fs_path")
    layout = FolderLayout(root, fingerprint.digest, this_process())
    try:
        layout.make()
        empty = layout.is_empty()
    except OSError as error:
        tier = FolderTier(layout, fingerprint, limit, direct == "on")
        tier.breakers.note(error)
    else:
        tier = FolderTier(layout, fingerprint, limit, _uses_direct(layout, direct), empty)
    tier.janitor.start()
    return tier


def _uses_direct(layout: FolderLayout, direct: Direct) -> bool:
    """Returns whether to use O_DIRECT; "auto" where it is seen to work. Raises ConfigError where "on" does not."""
    if direct == "off":
        return False
    supported = supports_direct(layout.new_temporary())
    if direct == "on" and supported is False:
        raise ConfigError(f"the file system of {layout.root} knows no O_DIRECT; possible are auto and off", "kv_fs_direct")
    return direct == "on" or bool(supported)


class FolderBreakers:
    """Two circuit breakers, as reads go on where only writing fails: a full disk, a read-only one."""

    def __init__(self, root: object, clock: Callable[[], float] = time.monotonic) -> None:
        name = f"the KV cache's folder {root}"
        self.folder = CircuitBreaker(1.0, 60.0, clock, name=name, settles=60.0)
        self.writes = CircuitBreaker(1.0, 60.0, clock, name=f"writing to {name}", settles=60.0)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raises TierError."""
        with self.folder.attempt(SLOW_READ):
            yield

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

    def __init__(self, layout: FolderLayout, fingerprint: Fingerprint, limit: int, direct: bool, empty: bool = False) -> None:
        """Opens a folder that is `empty`, or into which nothing is written before some process has counted what it holds."""
        self._layout, self._fingerprint, self._direct = layout, fingerprint, direct
        self._usage, self.breakers = FolderUsage(limit), FolderBreakers(layout.root)
        if empty:
            self._usage.set_counted(Amount(), Amount())
        self._lock = Lock()
        self._corrupt = self._full = 0
        self.janitor = FolderJanitor(layout, self._usage, self.breakers.note)

    @property
    def counters(self) -> TierCounters:
        folder, writes, held = self.breakers.folder, self.breakers.writes, self._usage.now
        return TierCounters(
            held.bytes,
            held.objects,
            self.janitor.evicted,
            self._corrupt,
            folder.failed + writes.failed,
            folder.refused + writes.refused,
            self._full,
        )

    def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self.breakers.reading():
            found = [self._exists(self._layout.name_of(key)) for key in keys]
            if not any(found):
                self._check_mounted()
            return found

    def read(self, key: ObjectKey, into: memoryview) -> None:
        path = self._layout.path_of(key)
        with self.breakers.reading():
            try:
                self._read_object(path, key, into.cast("B"))
            except FileNotFoundError:
                self._check_mounted()
                raise ObjectMissing(f"{path.name} is not there") from None
            except ObjectDamaged as error:
                self._drop(path, error)
                raise ObjectMissing(f"{path.name} {error}") from error

    def write(self, key: ObjectKey, data: memoryview) -> None:
        size = header_bytes(layers_of(key.part)) + pages(data.nbytes)
        if not self._usage.reserve(size):
            with self._lock:
                self._full += 1
            self.janitor.wake()
            if not self._usage.is_known:
                raise TierError(f"what {self._layout.root} holds is not known yet")
            raise TierError(f"{self._layout.root} may hold {self._usage.limit} bytes, and there is no room for {size} more now")
        placed = False
        try:
            with self.breakers.writing():
                placed = self._write_object(self._layout.path_of(key), key, data.cast("B"))
        finally:
            self._usage.settle(size, placed=placed)
        self.janitor.wake()

    def close(self) -> None:
        self.janitor.stop()

    def _read_object(self, path: Path, key: ObjectKey, into: memoryview) -> None:
        """Raises ObjectDamaged, OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0))
        try:
            stat = os.fstat(fd)
            header = buffer("header", header_bytes(layers_of(key.part)))
            expected = len(header) + pages(into.nbytes)
            if stat.st_size != expected:
                raise ObjectDamaged(f"has {stat.st_size} bytes, not {expected}")
            read_file(fd, header, into, self._direct)
            check_object(decode_header(header), self._fingerprint, key, into)
            if abs(time.time() - stat.st_mtime) > 60:  # eviction needs the order of use no finer
                with suppress(OSError):  # a read-only disk: the object only goes earlier
                    os.utime(fd)
        finally:
            os.close(fd)

    def _write_object(self, path: Path, key: ObjectKey, data: memoryview) -> bool:
        """Returns whether the object is new. Raises OSError."""
        if self._exists(path):
            return False
        header = encode_header(make_header(self._fingerprint, key, data))
        temporary = self._layout.new_temporary()
        try:
            try:
                write_file(temporary, header, data, self._direct)
            except FileNotFoundError:
                self._layout.make()
                write_file(temporary, header, data, self._direct)
            move_into_place(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in FULL:
                self.janitor.on_disk_full()
            raise
        return True

    def _exists(self, path: Path | str) -> bool:
        """Raises OSError."""
        try:
            os.stat(path)  # noqa: PTH116 - of hundreds of paths
        except FileNotFoundError:
            return False
        return True

    def _check_mounted(self) -> None:
        """Makes the folder again, should all of it be gone. Raises OSError, also where it is unmounted."""
        if not self._exists(self._layout.objects):
            self._layout.make()

    def _drop(self, path: Path, reason: ObjectDamaged) -> None:
        """Removes a damaged object. Only the first one is logged as a warning; all are counted."""
        logger.log(logging.DEBUG if self._corrupt else logging.WARNING, "%s %s; it is removed and computed again", path, reason)
        with self._lock:
            self._corrupt += 1
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._usage.drop(size)
