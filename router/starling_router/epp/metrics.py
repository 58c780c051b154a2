"""Metrics under the names that llm-d's EPP gives them, so that dashboards and autoscalers made for it work."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starling_agent.contract.backend import BackendState

from starling_router.backend import Backends

_SECONDS = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_MODEL = ("model_name", "target_model_name")


class EppMetrics(Collector):
    """Gauges are read when they are asked for. The model is what endpoints call theirs: clients' words are no labels."""

    def __init__(
        self, registry: CollectorRegistry, backends: Backends, states: Mapping[str, BackendState], held: Callable[[], int]
    ) -> None:
        self._backends, self._states, self._held = backends, states, held
        text = "Seconds from a request's headers to the first piece of its answer."
        self._ttft = Histogram("llm_d_epp_request_ttft_seconds", text, _MODEL, buckets=_SECONDS, registry=registry)
        registry.register(self)

    def first_piece(self, seconds: float) -> None:
        self._ttft.labels(*self._model).observe(seconds)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        ready = self._backends.ready
        waiting = sum(backend.open + backend.others for backend in ready) / max(1, len(ready))
        yield _gauge("flow_control_queue_size", "Requests that wait here for an endpoint.", self._held(), self._model)
        yield _gauge("request_running", "Requests that endpoints have from here.", self._running, self._model)
        yield _gauge("ready_endpoints", "Endpoints that are picked.", len(ready))
        yield _gauge("average_queue_size", "Requests that run or wait at a ready endpoint, in the mean.", waiting)

    @property
    def _running(self) -> int:
        return sum(backend.open for backend in self._backends.all)

    @property
    def _model(self) -> tuple[str, str]:
        name = next((state.models[0] for state in self._states.values() if state.models), "")
        return name, name


def _gauge(name: str, text: str, value: float, model: tuple[str, str] | None = None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"llm_d_epp_{name}", text, labels=() if model is None else _MODEL)
    family.add_metric(model or (), value)
    return family
