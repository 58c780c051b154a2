"""Layout of the folder:

objects/ab/c/abc...-<fingerprint>.kv   two levels by the hash of the object's key
tmp/                                   files that are being written
writers/                               what each engine process has written so far
lease                                  the process that evicts, and how much the folder holds
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import NamedTuple

from starling_engine.kv_offload.secondary.base import ObjectKey
from starling_engine.kv_offload.secondary.folder.object_file import FORMAT

SUFFIX = ".kv"

_numbers = count()


class FolderLayout:
    """The folder at `root`, for the objects of one model. `writer` names who has opened it: a process may do so several times."""

    def __init__(self, root: Path, digest: bytes) -> None:
        self.root = root
        self.objects, self.temporary, self.writers, self.lease = (root / name for name in ("objects", "tmp", "writers", "lease"))
        self.writer = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._model = digest + FORMAT.to_bytes(4, "little")
        self._prefix = str(self.objects)
        self._suffix = f"-{digest.hex()[:16]}{SUFFIX}"
        self._device: int | None = None

    def make(self) -> None:
        """Makes missing folders, on the file system of the first time: nothing may be written under an unmounted one.

        Raises OSError.
        """
        folders = self.objects, self.temporary, self.writers
        if self._device is None:
            self.root.mkdir(parents=True, exist_ok=True)
        device = self.root.stat().st_dev
        if not all(folder.is_dir() for folder in folders):
            if self._device not in (None, device):
                raise OSError(ENOENT, "another file system is there now", str(self.root))
            for folder in folders:
                folder.mkdir(exist_ok=True)
        self._device = device

    def path_of(self, key: ObjectKey) -> str:
        """Returns the object's path; formats and models never share one. A Path takes three times as long."""
        digest = sha256(self._model + key.name + struct.pack("<5I", key.group, *key.part)).hexdigest()
        return f"{self._prefix}/{digest[:2]}/{digest[2]}/{digest[:32]}{self._suffix}"

    def is_own(self, found: "ObjectFile") -> bool:
        """Returns whether an object is of this model as it is computed and laid out here."""
        return found.path.endswith(self._suffix)

    @contextmanager
    def new_file(self) -> Iterator[Path]:
        """Gives a path for a file that is to be renamed once it is whole; it is removed where an OSError prevents that."""
        path = self.temporary / f"{self.writer}.{next(_numbers)}"
        try:
            yield path
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def publish(self, path: Path, content: bytes) -> None:
        """Writes a small file as a whole or not at all. Raises OSError."""
        with self.new_file() as temporary:
            temporary.write_bytes(content)
            temporary.rename(path)


def move_into_place(temporary: Path, path: Path) -> None:
    """Gives a finished object its name. Raises OSError, also when the tree above the two levels is gone."""
    try:
        temporary.rename(path)
    except FileNotFoundError:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(exist_ok=True)
        temporary.rename(path)


class ObjectFile(NamedTuple):
    """An object's file. `used` is its time of modification in ns: about when it was last read."""

    used: int
    size: int
    path: str


def walk_objects(objects: Path) -> Iterator[list[ObjectFile]]:
    """Yields the objects of one folder of the second level after the other, in no order. Raises OSError."""
    for top in _entries(objects):
        for folder in _entries(top.path):
            yield list(_object_files(folder.path))


def _object_files(folder: str) -> Iterator[ObjectFile]:
    for entry in _entries(folder):
        with suppress(FileNotFoundError):
            if entry.name.endswith(SUFFIX):
                stat = entry.stat(follow_symlinks=False)
                yield ObjectFile(stat.st_mtime_ns, stat.st_size, entry.path)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Returns what a folder holds: nothing where it has gone meanwhile, or is a file of somebody else."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_unused(found: ObjectFile) -> bool:
    """Removes an object. Returns False where it has been read since it was found, or has gone. Raises OSError."""
    path = Path(found.path)
    try:
        if path.stat().st_mtime_ns != found.used:
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True
