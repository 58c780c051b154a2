"""What each process has written, in a file of its own: whoever evicts adds it to the last count."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from starling_engine.kv_offload.secondary.folder.layout import FolderLayout
from starling_engine.kv_offload.secondary.folder.usage import Amount

ABANDONED = 3600.0
"""Age in seconds of a file that nobody can still be writing."""

RENEWAL = ABANDONED / 6
"""Age in seconds at which a report is written again: were it removed, the next one would count all that its writer ever wrote."""

_decode = msgspec.json.Decoder(tuple[int, int]).decode


class UsageReports:
    """Of all processes that share the folder; amounts since each opened it."""

    def __init__(self, layout: FolderLayout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._clock = layout, clock
        self._mine = layout.writers / layout.new_temporary().name
        self._told_at: float | None = None
        self.told = Amount()

    def tell(self, written: Amount) -> None:
        """Raises OSError."""
        if written != self.told or self._is_missed():
            self._layout.publish(self._mine, msgspec.json.encode((written.bytes, written.objects)))
            self.told, self._told_at = written, self._clock()

    def _is_missed(self) -> bool:
        """Whether what was told is gone, or would soon be taken for that of a process that has ended."""
        return self._told_at is not None and (self._clock() - self._told_at > RENEWAL or not self._mine.exists())

    def of_others(self) -> dict[str, Amount]:
        """Raises OSError."""
        found = {}
        with os.scandir(self._layout.writers) as entries:
            for entry in entries:
                with suppress(FileNotFoundError, msgspec.DecodeError):
                    if entry.name != self._mine.name:
                        content = Path(entry.path).read_bytes()
                        found[entry.name] = Amount(*_decode(content))
        return found


def tidy(layout: FolderLayout) -> None:
    """Removes what processes left that have ended. Ages are by the mount's clock: the lease has just been written.

    Raises OSError.
    """
    try:
        now = layout.lease.stat().st_mtime
    except FileNotFoundError:
        return
    for folder in (layout.temporary, layout.writers):
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if layout.is_abandoned(entry) or now - entry.stat().st_mtime > ABANDONED:
                        Path(entry.path).unlink()
