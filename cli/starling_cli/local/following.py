"""The manifest on disk, read again whenever it changed."""

import os
from dataclasses import dataclass
from pathlib import Path

Stamp = tuple[int, int, int]


@dataclass
class FollowedFile:
    """`has_changed` is true once for each change, the first look included. Editors that replace a file are understood."""

    path: Path
    _seen: Stamp | None = None
    _looked: bool = False

    def has_changed(self) -> bool:
        stamp = _stamp(self.path)
        news = not self._looked or stamp != self._seen
        self._seen, self._looked = stamp, True
        return news


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
