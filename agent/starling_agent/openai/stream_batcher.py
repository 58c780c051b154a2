"""Batches the writes of streams.

A write is a system call and a wake-up, some 60 microseconds for any size. An engine on the CPU loses this time: it computes on the
same cores. So with more open streams each one pauses longer after a write, and the deltas of the pause go out in one write.
A single stream is written token by token, and no pause is long enough to be noticed. Models whose steps take longer than the pause
are not affected.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MIN_PAUSE = 0.002
"""Seconds; a shorter pause costs more than it saves."""


class StreamBatcher:
    """The pause for all streams of a process; each counts itself with `open_stream`."""

    def __init__(self, device: str) -> None:
        self._streams = 0
        shares_cores = device == "cpu"
        self._pause_per_stream = 0.0015 if shares_cores else 0.0005
        self._max_pause = 0.05 if shares_cores else 0.02

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """Counts a stream while it is open."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def pause(self) -> None:
        seconds = min(self._streams * self._pause_per_stream, self._max_pause)
        if seconds >= MIN_PAUSE:
            await asyncio.sleep(seconds)
