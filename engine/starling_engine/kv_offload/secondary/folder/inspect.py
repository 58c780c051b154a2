"""Inspection of a folder by people, whether engines use it or not: list, verify and purge its objects.

Nothing here waits for the engines or stops them: to them a file that goes is a miss.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from starling_engine.kv_offload.secondary.folder.layout import SUFFIX, FolderLayout, ObjectFile, remove_unused, walk_objects
from starling_engine.kv_offload.secondary.folder.object_file import ObjectDamaged, read_header


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
    for found in _objects(root):
        held = models.setdefault(_fingerprint_in(found.path), CachedModel(_fingerprint_in(found.path)))
        held.add(found)
        if held.model == "?":
            with suppress(ObjectDamaged, OSError):
                header = read_header(Path(found.path))
                held.model, held.dtype = header.model, header.dtype
    return sorted(models.values(), key=lambda model: -model.bytes)


def verify(root: Path) -> Iterator[tuple[ObjectFile, ObjectDamaged | OSError | None]]:
    """Yields each object and what is wrong with it, or why that cannot be known. Raises NoFolder, OSError."""
    for found in _objects(root):
        problem = _problem(root, Path(found.path))
        if not isinstance(problem, FileNotFoundError):
            yield found, problem


def purge(root: Path, fingerprint: str = "", before: float = float("inf")) -> Iterator[tuple[ObjectFile, OSError | None]]:
    """Removes objects whose fingerprint begins with `fingerprint` and that were not used since `before` (seconds since 1970).

    Yields them, each with the reason if it is still there. Raises NoFolder, OSError.
    """
    for found in _objects(root):
        if _fingerprint_in(found.path).startswith(fingerprint) and found.used / 1e9 < before:
            try:
                if remove_unused(found):
                    yield found, None
            except OSError as refused:
                yield found, refused


def _objects(root: Path) -> Iterator[ObjectFile]:
    """Returns all objects. Raises NoFolder, OSError."""
    try:
        os.scandir(root / "objects").close()
    except PermissionError as error:
        raise NoFolder(f"{error.filename}: permission denied") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = "holds no KV cache" if root.exists() else "does not exist"
        raise NoFolder(f"{root} {'is a file, not a folder' if root.is_file() else missing}") from error
    return chain.from_iterable(walk_objects(root / "objects"))


def _fingerprint_in(path: str) -> str:
    return path.removesuffix(SUFFIX).rpartition("-")[2]


def _problem(root: Path, path: Path) -> ObjectDamaged | OSError | None:
    try:
        header = read_header(path, whole=True)
    except (ObjectDamaged, OSError) as problem:
        return problem
    right = FolderLayout(root, bytes.fromhex(header.fingerprint)).path_of(header.key)
    return None if str(path) == right else ObjectDamaged("is another object's file")
