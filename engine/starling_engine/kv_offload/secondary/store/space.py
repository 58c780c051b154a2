"""Ranges of a buffer for values on their way: first fit, over a sorted list of what is free."""

import bisect

ALIGN = 4096


class Space:
    """Offsets in [0, size), in bytes. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        """(start, end), sorted, none next to another."""

    def take(self, count: int) -> int | None:
        """The start of `count` bytes that are free; None when there are none together."""
        count = _whole_pages(count)
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                self._free[index : index + 1] = [(start + count, end)] if end - start > count else []
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Back what `take(count)` returned."""
        end = start + _whole_pages(count)
        at = bisect.bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)


def _whole_pages(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
