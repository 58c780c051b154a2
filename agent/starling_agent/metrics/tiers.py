"""Metrics of the KV cache's tiers: a family for each field, a sample for each tier."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starling_engine.delta import TierStats

_GAUGES = {
    "bytes": ("bytes", "Bytes that the tier holds; of a shared tier those of all writers."),
    "capacity": ("capacity_bytes", "Bytes that it may hold; 0 if not known."),
    "objects": (
        "objects",
        "Objects that it holds: chunks of 64 tokens in the CPU tier; files or values in a secondary tier, a rank's part each.",
    ),
}
_COUNTERS = {
    "queries_total": ("queries", "Chunks looked up in it."),
    "hits_total": ("hits", "Chunks found in it."),
    "stored_bytes_total": ("stored_bytes", "Bytes written to it."),
    "loaded_bytes_total": ("loaded_bytes", "Bytes read from it."),
    "store_seconds_total": ("store_seconds", "Seconds of those writes, of all ranks and threads."),
    "load_seconds_total": ("load_seconds", "Seconds of those reads, of all ranks and threads."),
    "evictions_total": ("evictions", "Objects that it gave up for others."),
    "errors_total": ("errors", "Operations that failed."),
    "corrupt_total": ("corrupt", "Objects that were damaged, cut off or foreign, and so were dropped."),
    "refused_total": ("refused", "Operations that were not tried, because the tier had failed."),
    "full_total": ("full", "Objects that it did not store, because it was full."),
    "bypassed_total": ("bypassed", "Requests without a lookup in it, because it hangs or takes longer than computing."),
    "unwritten_total": ("unwritten", "Chunks that left the CPU tier before they were written to a secondary tier."),
}


def tier_metrics(tiers: Mapping[str, TierStats], labels: Mapping[str, str]) -> Iterable[Metric]:
    """Yields no family without tiers. Names of `_GAUGES` and `_COUNTERS` follow the prefix starling:kv_tier_."""
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
