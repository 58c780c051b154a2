"""A repository's files: the hub's list of them, how much of them is in the cache, and their verification."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling_engine.weights.hub import ALLOWED, IGNORED, HubName

from starling_agent.node.failures import transient

CHUNK = 1 << 20
SECTOR = 512


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on the hub. Only large files have `sha256`; `blob` is git's own hash."""

    path: str
    size: int
    blob: str
    sha256: str | None

    @property
    def cache_name(self) -> str:
        return self.sha256 or self.blob


def list_files(name: HubName) -> list[RemoteFile]:
    """Lists the files that serving needs. Raises errors of the hub's client."""
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.utils._paths import filter_repo_objects

    entries: Iterable[RepoFile] = (
        entry for entry in HfApi().list_repo_tree(name.repo, revision=name.revision, recursive=True) if isinstance(entry, RepoFile)
    )
    if name.file is None:
        patterns, others = [*ALLOWED], [*IGNORED]
        wanted = filter_repo_objects(entries, allow_patterns=patterns, ignore_patterns=others, key=lambda entry: entry.path)
    else:
        parts = frozenset(name.parts)
        wanted = (entry for entry in entries if entry.path in parts)
    return [RemoteFile(e.path, e.size, e.blob_id, e.lfs.sha256 if e.lfs is not None else None) for e in wanted]


def bytes_in_cache(blobs: Path, files: list[RemoteFile]) -> int:
    """Returns the bytes of the files that are in the cache, also of unfinished ones. Without a list everything counts."""
    if not files:
        return sum(map(_written, blobs.glob("*")))
    return sum(min(file.size, max(map(_written, blobs.glob(f"{file.cache_name}*")), default=0)) for file in files)


def _written(path: Path) -> int:
    """Returns the bytes written so far: a file may get its full size before its content."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * SECTOR)


def fingerprint(paths: Iterable[Path]) -> str:
    """Returns a text that changes when one of the files does. Reads no content."""
    lines = []
    for path in filter(Path.exists, sorted(paths)):
        status = path.stat()
        lines.append(f"{path.name} {status.st_size} {status.st_mtime_ns}\n")
    return "".join(lines)


def verify(folder: Path, files: list[RemoteFile], on_read: Callable[[int], None]) -> None:
    """Compares sizes and hashes, and calls `on_read` with the bytes read. Removes a wrong file. Raises NodeFailure."""
    read = 0
    for file in files:
        path = folder / file.path
        if not path.is_file():
            raise transient(f"{file.path} is missing after the download")
        size = path.stat().st_size
        digests = _digests(file, size)
        for chunk in _chunks(path):
            for digest in digests:
                digest.update(chunk)
            read += len(chunk)
            on_read(read)
        if size != file.size or file.cache_name not in [digest.hexdigest() for digest in digests]:
            _remove(path)
            raise transient(f"{file.path} is not what the hub has (by its size or hash); it was removed")


def _digests(file: RemoteFile, size: int) -> list[Any]:
    """Returns hashes of which one must match. For small files mirrors have a plain SHA-1, the hub has git's."""
    if file.sha256 is not None:
        return [hashlib.sha256()]
    git, plain = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), hashlib.sha1(usedforsecurity=False)
    return [git, plain]


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            yield chunk


def _remove(path: Path) -> None:
    blob = path.resolve()
    path.unlink()
    blob.unlink(missing_ok=True)
