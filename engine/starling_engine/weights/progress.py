"""Shows how far loading is: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from starling_engine.weights.loader import Progress, no_progress

logger = logging.getLogger("starling.weights")

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def loading_progress(show: bool) -> Iterator[Progress]:
    """The callback to give to `load_weights`. Closes the bar, or says how long it took, when the block ends well."""
    if not show:
        yield no_progress
    elif sys.stderr.isatty():
        with tqdm(desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield advance
    else:
        lines = _Lines()
        yield lines
        lines.finish()


class _Lines:
    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._total = 0

    def __call__(self, done: int, total: int) -> None:
        self._total = total
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            left = (now - self._start) / max(done, 1) * (total - done)
            logger.info("loading weights: %s of %s, %.0f s left", _amount(done), _amount(total), left)

    def finish(self) -> None:
        logger.info("loaded %s of weights in %.1f s", _amount(self._total), time.monotonic() - self._start)


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
