"""Counters over all engines of this process: they must not fall when an engine is started again in place."""

from starling_engine import AsyncEngine
from starling_engine.delta import Stats, add, add_totals


def added(past: Stats, now: Stats) -> Stats:
    """Returns `now` with the totals of `past` added."""
    result = Stats()
    add(result, now)
    add_totals(result, past)
    return result


class EngineTotals:
    """Adds the stats of the running engine to the totals of earlier ones."""

    def __init__(self) -> None:
        self._past = Stats()
        self._engine: AsyncEngine | None = None

    def begin(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def end(self) -> None:
        """Keeps the engine's totals and drops its gauges."""
        past = Stats()
        add_totals(past, self._now())
        self._past, self._engine = past, None

    def stats(self) -> Stats:
        return self._now()

    def sleep_level(self) -> int | None:
        """Returns the engine's level; None without an engine."""
        return None if self._engine is None else self._engine.sleep_level

    def _now(self) -> Stats:
        return added(self._past, self._engine.stats if self._engine is not None else Stats())
