"""The folder as a tier: what the transfers' threads call."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from starling_engine.kv_offload.secondary.base import ObjectKey, ObjectMissing, TierCounters, TierError
from starling_engine.kv_offload.secondary.fingerprint import Fingerprint
from starling_engine.kv_offload.secondary.folder.files import buffer, read_file, write_file
from starling_engine.kv_offload.secondary.folder.header import (
    ObjectDamaged,
    check,
    decode,
    encode,
    header_bytes,
    layers_of,
    make_header,
    pages,
)
from starling_engine.kv_offload.secondary.folder.janitor import FolderJanitor
from starling_engine.kv_offload.secondary.folder.layout import FolderLayout, place
from starling_engine.kv_offload.secondary.folder.outage import FULL, FolderBreakers, logger
from starling_engine.kv_offload.secondary.folder.usage import Amount, FolderUsage

TOUCH = 60.0
"""Seconds between two marks of use on one file: the order of eviction is as coarse, and reads seldom write."""


class FolderTier:
    """A FarTier. A read or a write is a file opened, moved by one system call, closed; nothing is kept open between them."""

    name = "filesystem"
    cpu_elsewhere = 0.0

    def __init__(self, layout: FolderLayout, fingerprint: Fingerprint, limit: int, direct: bool, empty: bool = False) -> None:
        """Unless it is known to be `empty`, nothing is written before it has been counted, or its count has been heard."""
        self._layout, self._fingerprint, self._direct = layout, fingerprint, direct
        self._usage, self._health = FolderUsage(limit), FolderBreakers(layout.root)
        if empty:
            self._usage.learn(Amount(), Amount())
        self._lock = Lock()
        self._corrupt = self._full = 0
        self.keeper = FolderJanitor(layout, self._usage, self._health)

    @property
    def counters(self) -> TierCounters:
        health, held = self._health, self._usage.now
        return TierCounters(
            held.bytes,
            held.objects,
            self.keeper.evicted,
            self._corrupt,
            health.folder.failed + health.writes.failed,
            health.folder.refused + health.writes.refused,
            self._full,
        )

    def find(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._health.reading():
            found = [self._is_there(self._layout.name_of(key)) for key in keys]
            if not any(found):
                self._look_whether_mounted()
            return found

    def read(self, key: ObjectKey, into: memoryview) -> None:
        path = self._layout.path_of(key)
        with self._health.reading():
            try:
                self._load(path, key, into.cast("B"))
            except FileNotFoundError:
                self._look_whether_mounted()
                raise ObjectMissing(f"{path.name} is not there") from None
            except ObjectDamaged as error:
                self._drop(path, error)
                raise ObjectMissing(f"{path.name} {error}") from error

    def write(self, key: ObjectKey, data: memoryview) -> None:
        size = header_bytes(layers_of(key.part)) + pages(data.nbytes)
        if not self._usage.reserve(size):
            with self._lock:
                self._full += 1
            self.keeper.wake()
            if not self._usage.is_known:
                raise TierError(f"what {self._layout.root} holds is not known yet")
            raise TierError(f"{self._layout.root} may hold {self._usage.limit} bytes, and there is no room for {size} more now")
        placed = False
        try:
            with self._health.writing():
                placed = self._store(self._layout.path_of(key), key, data.cast("B"))
        finally:
            self._usage.settle(size, placed=placed)
        self.keeper.wake()

    def close(self) -> None:
        self.keeper.stop()

    def report(self, error: OSError) -> None:
        """The folder could not be opened; it is tried again."""
        self._health.note(error)

    def _load(self, path: Path, key: ObjectKey, into: memoryview) -> None:
        """Raises Damaged, OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0))
        try:
            stat = os.fstat(fd)
            header = buffer("header", header_bytes(layers_of(key.part)))
            expected = len(header) + pages(into.nbytes)
            if stat.st_size != expected:
                raise ObjectDamaged(f"has {stat.st_size} bytes, not {expected}")
            read_file(fd, header, into, self._direct)
            check(decode(header), self._fingerprint, key, into)
            self._touch(fd, stat.st_mtime)
        finally:
            os.close(fd)

    def _store(self, path: Path, key: ObjectKey, data: memoryview) -> bool:
        """Whether it is new. Raises OSError."""
        if self._is_there(path):
            return False
        header = encode(make_header(self._fingerprint, key, data))
        temporary = self._layout.new_temporary()
        try:
            self._write_new(temporary, header, data)
            place(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in FULL:
                self.keeper.press()
            raise
        return True

    def _write_new(self, temporary: Path, header: bytes, data: memoryview) -> None:
        try:
            write_file(temporary, header, data, self._direct)
        except FileNotFoundError:
            self._layout.make()
            write_file(temporary, header, data, self._direct)

    def _is_there(self, path: Path | str) -> bool:
        """Raises OSError."""
        try:
            os.stat(path)  # noqa: PTH116 - of hundreds of paths
        except FileNotFoundError:
            return False
        return True

    def _look_whether_mounted(self) -> None:
        """Where nothing is found, all may be gone. Raises OSError."""
        if not self._is_there(self._layout.objects):
            self._layout.make()

    def _touch(self, fd: int, used: float) -> None:
        if abs(time.time() - used) > TOUCH:
            # A mark that cannot be made, on a read-only disk, only lets the object go earlier.
            with suppress(OSError):
                os.utime(fd)

    def _drop(self, path: Path, reason: ObjectDamaged) -> None:
        """Only the first is told at once; the others are counted."""
        logger.log(logging.DEBUG if self._corrupt else logging.WARNING, "%s %s; it is removed and computed anew", path, reason)
        with self._lock:
            self._corrupt += 1
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._usage.drop(size)
