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
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import NamedTuple

from starling_engine.kv_offload.secondary.base import ObjectKey
from starling_engine.kv_offload.secondary.folder.object_file import FORMAT

SUFFIX = ".kv"

_numbers = count()


@dataclass(frozen=True)
class WriterProcess:
    """A process that writes. `machine` changes with the boot and the container: `pid` means something only where it is equal."""

    id: str
    machine: str
    pid: int

    def is_gone(self, here: "WriterProcess") -> bool:
        """Returns whether the process is known to have ended: it ran on the machine of `here`."""
        if self.machine != here.machine or self.pid == here.pid:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            return False
        return False


def this_process() -> WriterProcess:
    """Returns another id at each call: one process may open the folder several times."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    machine = sha256(f"{boot}{Path('/proc/self/ns/pid').readlink()}".encode()).hexdigest()[:12]
    return WriterProcess(f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}", machine, os.getpid())


class FolderLayout:
    """The folder at `root`, for the objects of one model."""

    def __init__(self, root: Path, digest: bytes, process: WriterProcess) -> None:
        self.root = root
        self.process = process
        self.objects, self.temporary, self.writers, self.lease = (root / name for name in ("objects", "tmp", "writers", "lease"))
        self._model = digest + FORMAT.to_bytes(4, "little")
        self._prefix = str(self.objects)
        self._suffix = f"-{digest.hex()[:16]}{SUFFIX}"
        self._device: int | None = None

    def make(self) -> None:
        """Makes missing folders, on the file system of the first time: nothing may be written under an unmounted one.

        Raises OSError.
        """
        if self._device is None:
            self.root.mkdir(parents=True, exist_ok=True)
        folders = self.objects, self.temporary, self.writers
        if all(folder.is_dir() for folder in folders):
            self._device = self.root.stat().st_dev
            return
        if not self.objects.is_dir() and self._device not in (None, self.root.stat().st_dev):
            raise OSError(ENOENT, "another file system is there now", str(self.root))
        for folder in folders:
            folder.mkdir(exist_ok=True)
        self._device = self.root.stat().st_dev

    def is_empty(self) -> bool:
        """Returns whether there can be no object. Raises OSError."""
        with os.scandir(self.objects) as entries:
            return not any(entries)

    def path_of(self, key: ObjectKey) -> Path:
        """Returns the object's path; formats and models never share one."""
        return Path(self.name_of(key))

    def name_of(self, key: ObjectKey) -> str:
        """Returns the same in a third of the time: requests look up hundreds of objects."""
        digest = sha256(self._model + key.name + struct.pack("<5I", key.group, *key.part)).hexdigest()
        return f"{self._prefix}/{digest[:2]}/{digest[2]}/{digest[:32]}{self._suffix}"

    def new_temporary(self) -> Path:
        """Returns a path for one file, which names its writer."""
        return self.temporary / f"{self.process.machine}.{self.process.pid}.{self.process.id}.{next(_numbers)}"

    def is_abandoned(self, temporary: os.DirEntry[str]) -> bool:
        """Returns whether the file's writer is known to have ended."""
        machine, _, rest = temporary.name.partition(".")
        pid = rest.partition(".")[0]
        return pid.isdigit() and WriterProcess("", machine, int(pid)).is_gone(self.process)

    def publish(self, path: Path, content: bytes) -> None:
        """Writes a small file as a whole or not at all. Raises OSError."""
        temporary = self.new_temporary()
        try:
            temporary.write_bytes(content)
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def move_into_place(temporary: Path, path: Path) -> None:
    """Gives a finished object its name. Raises OSError, also when the tree above the two levels is gone."""
    try:
        temporary.rename(path)
    except FileNotFoundError:
        path.parent.parent.mkdir(exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        temporary.rename(path)


class ObjectFile(NamedTuple):
    """An object's file. `used` is its time of modification in ns: about when it was last read."""

    used: int
    size: int
    path: str


def object_folders(objects: Path) -> Iterator[str]:
    """Yields the folders of the second level, in no order. Raises OSError where `objects` cannot be listed."""
    with os.scandir(objects) as entries:
        tops = [entry.path for entry in entries]
    for top in tops:
        yield from (entry.path for entry in _listed(top))


def object_files(folder: str) -> Iterator[ObjectFile]:
    """Yields the objects of a folder of the second level; files that go meanwhile are left out. Raises OSError."""
    for entry in _listed(folder):
        with suppress(FileNotFoundError):
            if entry.name.endswith(SUFFIX):
                stat = entry.stat(follow_symlinks=False)
                yield ObjectFile(stat.st_mtime_ns, stat.st_size, entry.path)


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
