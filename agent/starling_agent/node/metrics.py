"""Metrics of the agent itself, and counters that outlive an engine."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starling_engine import AsyncEngine
from starling_engine.delta import Stats, add_stats, add_totals

from starling_agent.contract.report import PHASES, Report


class AgentCollector(Collector):
    """Reads the report at each scrape."""

    def __init__(self, report: Callable[[], Report]) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        phase = GaugeMetricFamily("starling:agent_phase", "1 for the phase that the agent is in.", labels=["phase"])
        for name in PHASES:
            phase.add_metric([name], float(name == report.phase))
        yield phase
        yield GaugeMetricFamily("starling:agent_ready", "1 while requests are accepted.", value=float(report.ready))
        yield GaugeMetricFamily("starling:agent_healthy", "1 while work progresses or there is none.", value=float(report.healthy))
        yield CounterMetricFamily(
            "starling:agent_engine_restarts", "Restarts of the engine in place.", value=float(report.engine_restarts)
        )


def added(past: Stats, now: Stats) -> Stats:
    """Returns `now` with the totals of `past` added."""
    result = Stats()
    add_stats(result, now)
    add_totals(result, past)
    return result


class EngineTotals:
    """Adds the stats of the running engine to the totals of earlier ones: counters do not fall when an engine is restarted."""

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
