"""How often a stream is written to.

A write is a system call and a wake-up, some 60 microseconds, whatever it carries; where the engine computes on the same cores
they are the engine's. So the more streams are open, the longer each one rests after a write, and what the engine gives it
meanwhile goes out together. A single stream is written token by token, and no rest is long enough to be seen. Models whose
steps take longer than the rest are not touched by any of this.
"""

import asyncio

SHORTEST_REST = 0.002
"""A shorter one costs more than it saves."""


class StreamBatcher:
    """Shared by all streams of a process; each counts itself in `streams` while it is open."""

    def __init__(self, device: str) -> None:
        self.streams = 0
        shares_cores = device == "cpu"
        self._rest_per_stream = 0.0015 if shares_cores else 0.0005
        self._longest_rest = 0.05 if shares_cores else 0.02

    async def rest(self) -> None:
        seconds = min(self.streams * self._rest_per_stream, self._longest_rest)
        if seconds >= SHORTEST_REST:
            await asyncio.sleep(seconds)
