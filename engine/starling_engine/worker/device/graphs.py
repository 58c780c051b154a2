"""Steps that are recorded once for a size and run again: a GPU is given one thing to do in place of hundreds."""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from starling_engine.platforms.queue import DeviceQueue, Replay
from starling_engine.worker.device.step_buffer import StepShape

logger = logging.getLogger("starling.worker")

LARGEST = 512
"""Tokens, and so rows, of the largest step that is recorded: what computes more is not held up by who launches it."""


def decode_sizes(max_rows: int) -> list[int]:
    """Numbers of rows, one token each. A step is filled up to the next one: reading weights costs the same for a few rows more."""
    top = min(max_rows, LARGEST)
    steps = ((8, 64, 8), (64, 256, 16), (256, top, 32))
    sizes = {1, 2, 4, top, *(size for first, last, by in steps for size in range(first, last, by))}
    return sorted(size for size in sizes if size <= top)


def mixed_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens of steps with prompts in them."""
    return [size for size in (32, 64, 128, 256, LARGEST) if size <= max_tokens]


class Graphs:
    """Recordings of steps by size. What has none yet is run as it comes, and recorded then."""

    def __init__(self, queue: DeviceQueue, max_rows: int, max_tokens: int) -> None:
        self._queue = queue
        self._decodes = [StepShape(size, size, decode=True) for size in decode_sizes(max_rows)]
        # One row more, to which the tokens belong that fill the step up.
        self._mixed = [StepShape(size, max_rows + 1) for size in mixed_sizes(max_tokens)]
        self._replays: dict[StepShape, Replay] = {}
        self._eager: set[StepShape] = set()
        """Those that could not be recorded."""

    @property
    def shapes(self) -> list[StepShape]:
        """All that are recorded, the largest first: the others then fit in its memory."""
        return sorted((*self._decodes, *self._mixed), reverse=True)

    def decode(self, rows: int) -> StepShape | None:
        """The smallest with room for so many rows of one token."""
        at = bisect_left(self._decodes, rows, key=lambda shape: shape.rows)
        return self._decodes[at] if at < len(self._decodes) else None

    def mixed(self, tokens: int, rows: int) -> StepShape | None:
        at = bisect_left(self._mixed, tokens, key=lambda shape: shape.tokens)
        return self._mixed[at] if at < len(self._mixed) and rows < self._mixed[at].rows else None

    def run(self, shape: StepShape, work: Callable[[], None]) -> None:
        replay = self._replays.get(shape)
        if replay is not None:
            replay()
            return
        work()
        if shape in self._eager:
            return
        began = time.perf_counter()
        try:
            self._replays[shape] = self._queue.record(work)
        except RuntimeError as error:
            logger.warning("a step of %s could not be recorded, and runs as it comes: %s", shape, error)
            self._eager.add(shape)
        logger.debug("recorded a step of %s in %.3f s", shape, time.perf_counter() - began)

    def forget(self) -> None:
        """Memory has moved: all is to be recorded again."""
        self._replays.clear()
        self._queue.forget()
