"""A histogram cheap enough for every token of every stream.

prometheus-client's own takes a lock and walks its buckets. Here one event loop writes: a bisection and two additions are enough.
"""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Seconds to a first token: from a cached prompt on an idle GPU to a long queue."""

ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1.0, 2.5)
"""Seconds between tokens: dense around 10 to 100 ms, where readers begin to notice."""

E2E_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
"""Seconds of a whole request."""

TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Tokens of a request."""


class Histogram:
    """Counts of observations by bucket. As in Prometheus, a bucket includes its bound."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        """Makes the family for a scrape, with cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._help, labels=list(labels))
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family
