"""Counters over all engines of this process: a restart in place must not look like a fall of what only grows."""

from starling_engine import AsyncEngine
from starling_engine.delta import Stats, add, add_totals


def added(past: Stats, now: Stats) -> Stats:
    """`now`, with its totals counted on from `past`."""
    result = Stats()
    add(result, now)
    add_totals(result, past)
    return result


class EngineTotals:
    def __init__(self) -> None:
        self._past = Stats()
        self._engine: AsyncEngine | None = None

    def begin(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def end(self) -> None:
        """Keeps what the engine counted to its end; what it held is gone."""
        past = Stats()
        add_totals(past, self._now())
        self._past, self._engine = past, None

    def stats(self) -> Stats:
        return self._now()

    def sleep_level(self) -> int | None:
        """The engine's, while there is one."""
        return None if self._engine is None else self._engine.sleep_level

    def _now(self) -> Stats:
        return added(self._past, self._engine.stats if self._engine is not None else Stats())
