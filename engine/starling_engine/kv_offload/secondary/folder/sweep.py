"""One walk through the objects counts them and finds the oldest; then as many of these go as must."""

import heapq
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starling_engine.kv_offload.secondary.folder.layout import SUFFIX
from starling_engine.kv_offload.secondary.folder.usage import Amount

Breathe = Callable[[], None]
"""Called often while a walk goes on. It may sleep, and raises to end it."""


class ObjectFile(NamedTuple):
    """An object's file. `used` is its time of modification, ns: when it was last read, about."""

    used: int
    size: int
    path: str


@dataclass
class Swept:
    """`held` is what there is after `evicted` objects went, `largest` the bytes of the largest of all."""

    held: Amount
    evicted: int
    largest: int


class Oldest:
    """The least recently used objects, of `goal` bytes together or a little more: no list of all is needed to evict a few."""

    def __init__(self, goal: int) -> None:
        self._goal, self._bytes = goal, 0
        self._newest_first: list[tuple[int, ObjectFile]] = []

    def offer(self, found: ObjectFile) -> None:
        enough = self._bytes >= self._goal
        if enough and (not self._newest_first or found.used >= -self._newest_first[0][0]):
            return
        heapq.heappush(self._newest_first, (-found.used, found))
        self._bytes += found.size
        while self._bytes - self._newest_first[0][1].size >= self._goal:
            self._bytes -= heapq.heappop(self._newest_first)[1].size

    def __iter__(self) -> Iterator[ObjectFile]:
        return iter(sorted(found for _, found in self._newest_first))


def sweep(objects: Path, goal: int, keep: Callable[[int], int], breathe: Breathe) -> Swept:
    """Counts all and evicts the oldest, up to `goal` bytes of them, until no more than `keep(bytes that there are)` are left.

    Raises OSError when the folder cannot be listed.
    """
    held, evicted, largest, oldest = Amount(), 0, 0, Oldest(goal)
    for found in walk(objects, breathe):
        held += Amount(found.size, 1)
        largest = max(largest, found.size)
        oldest.offer(found)
    wanted = keep(held.bytes)
    for found in oldest:
        if held.bytes <= wanted:
            break
        if evict(found):
            held, evicted = held - Amount(found.size, 1), evicted + 1
        breathe()
    return Swept(held, evicted, largest)


def evict(found: ObjectFile) -> bool:
    """Whether it is gone; not when it has been read since it was found, nor when it is another's to remove. Raises OSError."""
    try:
        path = Path(found.path)
        if path.stat().st_mtime_ns != found.used:
            return False
        path.unlink()
    except PermissionError:
        return False
    except FileNotFoundError:
        pass
    return True


def walk(objects: Path, breathe: Breathe) -> Iterator[ObjectFile]:
    """All objects, in no order. What goes meanwhile is left out. Raises OSError."""
    with os.scandir(objects) as entries:
        tops = [entry.path for entry in entries]
    for top in tops:
        for second in _listed(top):
            for entry in _listed(second.path):
                with suppress(FileNotFoundError):
                    if entry.name.endswith(SUFFIX):
                        stat = entry.stat(follow_symlinks=False)
                        yield ObjectFile(stat.st_mtime_ns, stat.st_size, entry.path)
            breathe()


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
