"""Metrics of the leader: the seconds that changes of the group's size take."""

from collections.abc import Iterable

from prometheus_client import Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from starling_agent.contract.scale import Operation

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Seconds: from a commit between two tokens to the loading of a large model."""


class OperationTimes(Collector):
    """Each operation counts once, when it has ended."""

    def __init__(self) -> None:
        self._seen: str | None = None
        self._seconds = Histogram(
            "starling:elastic_operation_seconds", "What phases of changes of size took.", ["phase"], registry=None, buckets=BUCKETS
        )

    def observe(self, operation: Operation) -> None:
        if not operation.ended or operation.id == self._seen:
            return
        self._seen = operation.id
        for phase, seconds in operation.seconds.items():
            self._seconds.labels(phase).observe(seconds)

    def collect(self) -> Iterable[Metric]:
        return self._seconds.collect()
