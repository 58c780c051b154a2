"""How often a stream is written to.

A write is a system call and a wake-up, some 30 microseconds, whatever it carries; on a machine that computes on the same cores
they are the engine's. So the more streams are open, the longer each one rests after a write, and what the engine gives it
meanwhile goes out together. A single stream is written token by token, and no rest is long enough to be seen.
"""

import asyncio

SECONDS_PER_STREAM = 0.001
"""Of rest: all streams together are written to at most 1000 times a second while there are few."""

SHORTEST_REST = 0.002
"""A shorter one costs more than it saves."""

LONGEST_REST = 0.03


class Pace:
    """Shared by all streams of a process; each counts itself in `streams` while it is open."""

    def __init__(self) -> None:
        self.streams = 0

    async def rest(self) -> None:
        seconds = min(self.streams * SECONDS_PER_STREAM, LONGEST_REST)
        if seconds >= SHORTEST_REST:
            await asyncio.sleep(seconds)
