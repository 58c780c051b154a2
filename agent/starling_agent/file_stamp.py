"""Stamps of files, which show changes: files of a Secret change while a server runs."""

from pathlib import Path


def file_stamp(file: Path) -> object:
    """Returns a value that changes with the file; None while the file cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
