"""Inspection of a folder by people, whether engines use it or not: list, verify and purge its objects.

Nothing here waits for the engines or stops them: to them a file that goes is a miss.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starling_engine.kv_offload.secondary.folder.layout import (
    SUFFIX,
    FolderLayout,
    ObjectFile,
    object_files,
    object_folders,
    this_process,
)
from starling_engine.kv_offload.secondary.folder.object_file import (
    PAGE,
    ObjectDamaged,
    ObjectHeader,
    buffer,
    check_layers,
    decode_header,
    header_bytes,
    pages,
    read_file,
)


class NoFolder(Exception):
    """There is no cache at the path, or this user may not see it; the message says which."""


@dataclass
class CachedModel:
    """The objects of one model. `fingerprint` is the part of it in the files' names; times are in seconds since 1970."""

    fingerprint: str
    model: str = "?"
    dtype: str = "?"
    objects: int = 0
    bytes: int = 0
    oldest: float = float("inf")
    newest: float = 0.0

    def add(self, found: ObjectFile) -> None:
        self.objects, self.bytes = self.objects + 1, self.bytes + found.size
        self.oldest, self.newest = min(self.oldest, found.used / 1e9), max(self.newest, found.used / 1e9)


def list_models(root: Path) -> list[CachedModel]:
    """Returns the biggest first. Opens files only until each model has a name. Raises NoFolder, OSError."""
    models: dict[str, CachedModel] = {}
    for found in objects(root):
        held = models.setdefault(fingerprint_in(found.path), CachedModel(fingerprint_in(found.path)))
        held.add(found)
        if held.model == "?":
            with suppress(ObjectDamaged, OSError):
                header = read_object(Path(found.path))
                held.model, held.dtype = header.model, header.dtype
    return sorted(models.values(), key=lambda model: -model.bytes)


def verify(root: Path) -> Iterator[tuple[ObjectFile, ObjectDamaged | OSError | None]]:
    """Yields each object and what is wrong with it, or why that cannot be known. Raises NoFolder, OSError."""
    for found in objects(root):
        wrong: ObjectDamaged | OSError | None = None
        try:
            _verify(root, Path(found.path))
        except FileNotFoundError:
            continue
        except (ObjectDamaged, OSError) as error:
            wrong = error
        yield found, wrong


def purge(root: Path, fingerprint: str = "", before: float = float("inf")) -> Iterator[tuple[ObjectFile, OSError | None]]:
    """Removes objects whose fingerprint begins with `fingerprint` and that were not used since `before` (seconds since 1970).

    Yields them, each with the reason if it is still there. Raises NoFolder, OSError.
    """
    for found in objects(root):
        if fingerprint_in(found.path).startswith(fingerprint) and found.used / 1e9 < before:
            refused: OSError | None = None
            try:
                if not _remove(Path(found.path), before):
                    continue
            except OSError as error:
                refused = error
            yield found, refused


def _remove(path: Path, before: float) -> bool:
    """Returns False when the file went by itself, or has been used since it was found. Raises OSError."""
    try:
        if path.stat().st_mtime >= before:
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def objects(root: Path) -> Iterator[ObjectFile]:
    """Yields all objects. Raises NoFolder, OSError."""
    folder = root / "objects"
    try:
        if not stat.S_ISDIR(root.stat().st_mode):
            raise NoFolder(f"{root} is a file, not a folder")
        os.scandir(folder).close()
    except PermissionError as error:
        raise NoFolder(f"{error.filename}: permission denied") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = "holds no KV cache" if root.exists() else "does not exist"
        raise NoFolder(f"{root} {missing}") from error
    return (found for second in object_folders(folder) for found in object_files(second))


def fingerprint_in(path: str) -> str:
    return path.removesuffix(SUFFIX).rpartition("-")[2]


def _verify(root: Path, path: Path) -> None:
    """Raises ObjectDamaged, OSError."""
    header = read_object(path, whole=True)
    if FolderLayout(root, bytes.fromhex(header.fingerprint), this_process()).path_of(header.key) != path:
        raise ObjectDamaged("is another object's file")


def read_object(path: Path, whole: bool = False) -> ObjectHeader:
    """Reads the header, and if `whole` checks the data, too. Raises ObjectDamaged, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        first = buffer("header", 16 * PAGE)  # headers of many layers have several pages
        header = decode_header(first[: os.preadv(fd, [first], 0)])
        ahead = header_bytes(len(header.layers))
        if size != ahead + pages(header.bytes):
            raise ObjectDamaged(f"has {size} bytes, not {ahead + pages(header.bytes)}")
        if whole:
            data = buffer("data", header.bytes)
            read_file(fd, buffer("header", ahead), data, direct=False)
            check_layers(header, data)
        return header
    finally:
        os.close(fd)
