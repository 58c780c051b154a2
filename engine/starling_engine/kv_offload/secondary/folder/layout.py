"""Where things are in the folder:

objects/ab/c/abc...-<fingerprint>.kv   two levels by the hash of the object's name
tmp/                                   files that are being written
writers/                               what each engine process has written so far
lease                                  who evicts, and how much there is
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from hashlib import sha256
from itertools import count
from pathlib import Path
from struct import Struct

from starling_engine.kv_offload.secondary.base import ObjectKey
from starling_engine.kv_offload.secondary.folder.header import FORMAT

SUFFIX = ".kv"
FINGERPRINT_DIGITS = 16
_NUMBERS = Struct("<5I")
_numbers = count()


@dataclass(frozen=True)
class WriterProcess:
    """Who writes. `machine` changes with the boot and the container, so that `pid` means something only where it is equal."""

    id: str
    machine: str
    pid: int

    def is_gone(self, here: "WriterProcess") -> bool:
        """Whether the process is known to have ended: it ran where `here` runs."""
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
    """Another id at each call: one process may open the folder several times."""
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
        self._suffix = f"-{digest.hex()[:FINGERPRINT_DIGITS]}{SUFFIX}"
        self._device: int | None = None

    def make(self) -> None:
        """The folders that are missing; on the file system that was there first, for an unmounted one must not be written under.

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
        """Whether there can be no object. Raises OSError."""
        with os.scandir(self.objects) as entries:
            return not any(entries)

    def path_of(self, key: ObjectKey) -> Path:
        """Of the object; formats and models never share one."""
        return Path(self.name_of(key))

    def name_of(self, key: ObjectKey) -> str:
        """The same, in a third of the time: requests look for hundreds at once."""
        named = sha256(self._model + key.name + _NUMBERS.pack(key.group, *key.part)).hexdigest()
        return f"{self._prefix}/{named[:2]}/{named[2]}/{named[:32]}{self._suffix}"

    def new_temporary(self) -> Path:
        """A path for one file, which tells whose it is."""
        return self.temporary / f"{self.process.machine}.{self.process.pid}.{self.process.id}.{next(_numbers)}"

    def is_abandoned(self, temporary: os.DirEntry[str]) -> bool:
        """Whether it is a file whose writer is known to have ended."""
        machine, _, rest = temporary.name.partition(".")
        pid = rest.partition(".")[0]
        return pid.isdigit() and WriterProcess("", machine, int(pid)).is_gone(self.process)

    def publish(self, path: Path, content: bytes) -> None:
        """A small file as a whole or not at all. Raises OSError."""
        temporary = self.new_temporary()
        try:
            temporary.write_bytes(content)
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def place(temporary: Path, path: Path) -> None:
    """Gives a finished object its name. Raises OSError, also when the tree above the two levels is gone."""
    try:
        temporary.rename(path)
    except FileNotFoundError:
        path.parent.parent.mkdir(exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        temporary.rename(path)
