"""Metrics of the KV cache's tiers, each under its name."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_engine.delta import Stats, TierStats


def scrape(stats: Stats) -> dict[tuple[str, str | None], float]:
    text = Exporter(EngineCollector(lambda: stats, "chat", CacheShape(16), RequestMetrics())).render().decode()
    families = text_string_to_metric_families(text)
    return {(sample.name, sample.labels.get("tier")): sample.value for family in families for sample in family.samples}


def test_every_number_of_a_tier_has_a_metric() -> None:
    fields = [name for name in TierStats.__struct_fields__ if name != "shared"]
    folder = TierStats(shared=True, **{name: number for number, name in enumerate(fields, 1)})
    found = scrape(Stats(tiers={"cpu": TierStats(bytes=99), "filesystem": folder}))
    names = {name for name, tier in found if tier == "filesystem"}
    assert sorted(found[name, "filesystem"] for name in names) == list(range(1, len(fields) + 1))
    assert all(name.startswith("starling:kv_tier_") for name in names)
    assert found["starling:kv_tier_bytes", "cpu"] == 99
    assert found["starling:kv_tier_capacity_bytes", "filesystem"] == folder.capacity
    assert found["starling:kv_tier_objects", "filesystem"] == folder.objects
    assert found["starling:kv_tier_hits_total", "filesystem"] == folder.hits_total


def test_without_tiers_there_are_no_metrics_of_them() -> None:
    assert not [name for name, _ in scrape(Stats()) if "kv_tier" in name]


def test_metrics_of_external_hits_have_vllms_names() -> None:
    found = scrape(Stats(external_queries_total=128, external_hits_total=64))
    assert found["vllm:external_prefix_cache_queries_total", None] == 128
    assert found["vllm:external_prefix_cache_hits_total", None] == 64


def test_stats_of_tiers_are_serialised_with_the_others() -> None:
    stats = Stats(running=1, tiers={"cpu": TierStats(bytes=7, load_seconds_total=0.5)})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=Stats) == stats
