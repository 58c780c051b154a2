"""The agent's own metrics, which need no engine."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
