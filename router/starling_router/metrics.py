"""The router's metrics, in Prometheus' form."""

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from starling_router.backend import Backend, Backends

CONTENT_TYPE = CONTENT_TYPE_LATEST
CAUSES = ("tokens", "concurrent", "requests", "bytes", "seconds")
"""Limits for which a tenant's request is refused: its quota's and the hold's."""
_HOLD_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)

_GAUGES: Sequence[tuple[str, str, Callable[[Backend], float]]] = (
    ("ready", "Whether the backend is picked.", lambda backend: backend.ready),
    ("open_requests", "Requests that this router has open.", lambda backend: backend.open),
    ("other_requests", "Requests that others have open, when it was last asked.", lambda backend: backend.others),
    ("pending_tokens", "Prompt tokens of requests without a first token.", lambda backend: backend.pending),
)


def value(metric: Counter | Gauge) -> int:
    """Returns what a counter or gauge of whole numbers is at."""
    return int(next(iter(metric.collect())).samples[0].value)


class TenantCounters:
    """Counters of one tenant. Their labels are names of the tenants' file: no key, and nothing that a client chooses."""

    def __init__(self, metrics: "RouterMetrics", name: str) -> None:
        self.requests = metrics.tenant_requests.labels(name)
        self.prompt_tokens = metrics.tenant_tokens.labels(name, "prompt")
        self.output_tokens = metrics.tenant_tokens.labels(name, "output")
        self.held = metrics.tenant_held.labels(name)
        self._refused = {cause: metrics.tenant_refused.labels(name, cause) for cause in CAUSES}

    def refused(self, cause: str) -> Counter:
        return self._refused[cause]

    @property
    def all_refused(self) -> int:
        return sum(map(value, self._refused.values()))


class RouterMetrics:
    """Counters of picks; gauges are read from the backends when they are asked for."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._reasons: dict[str, set[str]] = {}
        """Reasons for which backends were picked, by their names: labels of series that go with the backend."""
        self.registry = CollectorRegistry()
        labels = ("backend", "reason")
        self.picks = Counter("starling:router_picks", "Requests by backend and reason.", labels, registry=self.registry)
        self.prompt_tokens = self._counter("starling:router_prompt_tokens", "Tokens of prompts, estimated without a tokenizer.")
        self.cached_tokens = self._counter("starling:router_cached_tokens", "Those expected in the picked backend's cache.")
        self.exact_prompts = self._counter("starling:router_exact_prompts", "Prompts that went by the engine's own blocks.")
        self.retries = self._counter("starling:router_retries", "Requests that went on to another backend before their answer.")
        self.broken = self._counter("starling:router_broken_answers", "Answers that were cut, as by a backend that went away.")
        self.resumed = self._counter("starling:router_resumed_streams", "Streams that another backend went on with.")
        self.refused = self._counter("starling:router_refused", "Requests for which there was no backend.")
        self.added = Histogram(
            "starling:router_seconds", "Seconds from a request's body to its backend.", buckets=_SECONDS, registry=self.registry
        )
        self.held = Gauge("starling:router_held_requests", "Requests that wait here for a backend.", registry=self.registry)
        self.hold_seconds = Histogram(
            "starling:router_hold_seconds", "Seconds that requests waited here.", buckets=_HOLD_SECONDS, registry=self.registry
        )
        refused = "Requests that did not wait here, or no longer, by the bound that they met."
        self.hold_refused = Counter("starling:router_hold_refused", refused, ("bound",), registry=self.registry)
        self.tenant_requests = Counter("starling:router_tenant_requests", "Requests.", ("tenant",), registry=self.registry)
        text = "Tokens by their kind, prompt or output, as answers say; estimated for answers that do not."
        self.tenant_tokens = Counter("starling:router_tenant_tokens", text, ("tenant", "kind"), registry=self.registry)
        self.tenant_held = Gauge("starling:router_tenant_held_requests", "Requests that wait.", ("tenant",), registry=self.registry)
        text = "Refused requests, by the limit that they met."
        self.tenant_refused = Counter("starling:router_tenant_refused", text, ("tenant", "cause"), registry=self.registry)
        self._gauges = [
            (Gauge(f"starling:router_{name}", text, ("backend",), registry=self.registry), read) for name, text, read in _GAUGES
        ]

    def picked(self, backend: Backend, reason: str, *, tokens: int, cached: int, exact: bool) -> None:
        """Counts a pick that a backend has accepted, and the tokens of its prompt."""
        self.picks.labels(backend.name, reason).inc()
        self._reasons.setdefault(backend.name, set()).add(reason)
        self.prompt_tokens.inc(tokens)
        self.cached_tokens.inc(cached)
        if exact:
            self.exact_prompts.inc()

    def weights(self, weights: Mapping[str, float]) -> None:
        """Shows the weight of each reason for a pick."""
        gauge = Gauge("starling:router_policy_weight", "Weights of the reasons for picks.", ("reason",), registry=self.registry)
        for reason, weight in weights.items():
            gauge.labels(reason).set(weight)

    def tenant(self, name: str) -> TenantCounters:
        return TenantCounters(self, name)

    def render(self) -> bytes:
        for gone in self._reasons.keys() - {backend.name for backend in self._backends.all}:
            for reason in self._reasons.pop(gone):
                self.picks.remove(gone, reason)
        for gauge, read in self._gauges:
            gauge.clear()  # backends that went have none
            for backend in self._backends.all:
                gauge.labels(backend.name).set(read(backend))
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)
