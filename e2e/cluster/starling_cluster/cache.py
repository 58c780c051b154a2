"""Where the harness keeps what is slow to make: outside the checkout, shared by all checkouts, safe against two builders."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]


def folder() -> Path:
    """`e2e` in the project's cache folder. It may not exist yet."""
    configured = os.environ.get("STARLING_CACHE")
    return (Path(configured) if configured else Path.home() / ".cache" / "starling") / "e2e"


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Waits for, and holds, the lock of a file or folder. The kernel frees it when the holder dies."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open(path: Path) -> int:
    if path.is_dir():
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT)
