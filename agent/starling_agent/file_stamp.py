"""Files that are mounted from a Secret change while a server runs: a stamp tells two states of one apart."""

from pathlib import Path


def file_stamp(file: Path) -> object:
    """The state of a file, to be compared with a later one; None while it cannot be looked at."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
