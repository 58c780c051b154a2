"""The private folder of one run: it holds the admin token and the Secrets of the manifest, so it must not outlive the run.

A run that is killed cannot remove its folder; the next one does. A lock shows which runs are alive.
"""

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PREFIX = "starling-up-"
_LOCK = "lock"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Makes a folder below $TMPDIR for this user alone, and removes it at the end."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder


def _sweep(parent: Path) -> None:
    """Removes the folders of killed runs. Those of other users cannot be opened, and stay."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            if _is_free(file):
                shutil.rmtree(lock.parent, ignore_errors=True)


def _is_free(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
