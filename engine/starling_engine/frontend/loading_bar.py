"""The progress of loading: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

from starling_engine.byte_sizes import format_bytes
from starling_engine.core.messages import Loading

logger = logging.getLogger("starling.weights")

SECONDS_BETWEEN_LINES = 5.0


class LoadingBar:
    """Call it with each `Loading`, and `close` it when the engine is ready or has failed."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._start = self._last = time.monotonic()

    def __call__(self, loading: Loading) -> None:
        if not loading.total:
            return
        if sys.stderr.isatty():
            self._draw(loading)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            left = (self._last - self._start) / max(loading.done, 1) * (loading.total - loading.done)
            logger.info("loading weights: %s of %s, %.0f s left", format_bytes(loading.done), format_bytes(loading.total), left)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.update((self._bar.total or 0) - self._bar.n)
            self._bar.close()

    def _draw(self, loading: Loading) -> None:
        if self._bar is None:
            self._bar = tqdm(desc="Loading weights", total=loading.total, unit="B", unit_scale=True, unit_divisor=1024)
        self._bar.update(loading.done - self._bar.n)
