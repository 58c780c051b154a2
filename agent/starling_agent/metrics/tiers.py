"""The KV cache's tiers as they are scraped: a family for each field, a sample for each tier that there is."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starling_engine.delta import TierStats

_GAUGES = {
    "bytes": ("bytes", "Bytes that the tier holds; of a shared one all, whoever wrote them."),
    "capacity": ("capacity_bytes", "Bytes that it may hold; 0 where that is not known."),
    "objects": (
        "objects",
        "What it holds: each a chunk of 64 tokens in the CPU tier; outside a file or value, a rank's part of one.",
    ),
}
_COUNTERS = {
    "queries_total": ("queries", "Chunks looked for in it."),
    "hits_total": ("hits", "Chunks found in it."),
    "stored_bytes_total": ("stored_bytes", "Bytes written to it."),
    "loaded_bytes_total": ("loaded_bytes", "Bytes read from it."),
    "store_seconds_total": ("store_seconds", "Seconds of those writes, of all ranks and threads."),
    "load_seconds_total": ("load_seconds", "Seconds of those reads, of all ranks and threads."),
    "evictions_total": ("evictions", "Objects that it gave up for others."),
    "errors_total": ("errors", "Operations that failed."),
    "corrupt_total": ("corrupt", "Objects that were damaged, cut off or foreign, and so were dropped."),
    "refused_total": ("refused", "Operations that were not tried, because it is out of order."),
    "full_total": ("full", "Objects that it did not take, because it had no room for them."),
    "bypassed_total": ("bypassed", "Requests that did not ask it, because it hangs or takes longer than computing."),
    "unwritten_total": ("unwritten", "Chunks that left the CPU tier before they could be written to any tier outside."),
}


def tier_metrics(tiers: Mapping[str, TierStats], labels: Mapping[str, str]) -> Iterable[Metric]:
    """Nothing where there are no tiers. The names of `_GAUGES` and `_COUNTERS` follow starling:kv_tier_."""
    kinds: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], Mapping[str, tuple[str, str]]], ...] = (
        (GaugeMetricFamily, _GAUGES),
        (CounterMetricFamily, _COUNTERS),
    )
    for family, fields in kinds if tiers else ():
        for field, (name, text) in fields.items():
            made = family(f"starling:kv_tier_{name}", text, labels=[*labels, "tier"])
            for tier, stats in tiers.items():
                made.add_metric([*labels.values(), tier], getattr(stats, field))
            yield made
