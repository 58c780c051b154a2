"""Prometheus metrics of the operator, at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starling_crds.v1alpha1.status import InferenceServiceStatus

from starling_operator.logs import Key
from starling_operator.plan.elastic.elastic_state import ended

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

RECONCILE_SECONDS = Histogram(
    "starling_operator_reconcile_duration_seconds",
    "Duration of one reconcile of one service",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
RECONCILES = Counter("starling_operator_reconcile_total", "Reconciles", registry=REGISTRY)
RECONCILE_ERRORS = Counter("starling_operator_reconcile_errors_total", "Reconciles that failed", registry=REGISTRY)
CONDITION = Gauge("starling_operator_condition", "1: the condition is True", ["namespace", "name", "type"], registry=REGISTRY)
LEADER = Gauge("starling_operator_leader", "1: this process holds the Lease and acts", registry=REGISTRY)
API_WRITES = Counter("starling_operator_api_writes_total", "Writes sent to the API server", ["verb"], registry=REGISTRY)
OPERATION_SECONDS = Histogram(
    "starling_operator_elastic_operation_seconds",
    "Phases of changes of a group's size, as its leader timed them, when the change has ended",
    ["phase"],
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
    registry=REGISTRY,
)


def observe_operations(before: InferenceServiceStatus, after: InferenceServiceStatus) -> None:
    """Observes the operations that ended between two statuses of a service."""
    running = {group.operation.id for group in before.groups if group.operation is not None and not ended(group.operation)}
    for group in after.groups:
        if group.operation is not None and group.operation.id in running and ended(group.operation):
            for phase, seconds in group.operation.seconds:
                if seconds > 0:
                    OPERATION_SECONDS.labels(phase).observe(seconds)


class ConditionGauges:
    """One gauge for each condition of each service, removed with the service."""

    def __init__(self) -> None:
        self._shown: dict[Key, dict[str, str]] = {}

    def show(self, key: Key, status: InferenceServiceStatus) -> None:
        wanted: dict[str, str] = {condition.type: condition.status for condition in status.conditions}
        shown = self._shown.get(key, {})
        for kind in shown.keys() - wanted.keys():
            CONDITION.remove(*key, kind)
        for kind, value in wanted.items():
            if shown.get(kind) != value:
                CONDITION.labels(*key, kind).set(value == "True")
        self._shown[key] = wanted

    def forget(self, key: Key) -> None:
        for kind in self._shown.pop(key, {}):
            CONDITION.remove(*key, kind)
