"""Metrics of EPLB, and of the sources that ranks load experts from."""

from starling_agent.metrics.exporter import CacheShape, EngineCollector, Exporter
from starling_agent.metrics.requests import RequestMetrics
from starling_engine.delta import Stats


def scrape(stats: Stats) -> str:
    return Exporter(EngineCollector(lambda: stats, "experts", CacheShape(16), RequestMetrics())).render().decode()


def test_metrics_have_the_balance_and_the_moved_experts() -> None:
    stats = Stats(eplb_balance=0.9, eplb_balance_before=0.5, eplb_balance_after=0.95, eplb_rearrangements_total=2)
    stats.eplb_experts_moved_total, stats.eplb_seconds_total = 40, 1.5
    text = scrape(stats)
    for line in (
        'starling:eplb_balance{model_name="experts"} 0.9',
        'starling:eplb_balance_before{model_name="experts"} 0.5',
        'starling:eplb_balance_after{model_name="experts"} 0.95',
        'starling:eplb_rearrangements_total{model_name="experts"} 2.0',
        'starling:eplb_experts_moved_total{model_name="experts"} 40.0',
        'starling:eplb_seconds_total{model_name="experts"} 1.5',
    ):
        assert line in text.splitlines(), line


def test_metrics_have_the_bytes_of_experts_by_source() -> None:
    text = scrape(Stats(epoch_peer_bytes_total=300, epoch_checkpoint_bytes_total=20)).splitlines()
    assert 'starling:elastic_expert_bytes_total{model_name="experts",source="peers"} 300.0' in text
    assert 'starling:elastic_expert_bytes_total{model_name="experts",source="checkpoint"} 20.0' in text


def test_without_an_engine_no_sleep_state_is_set() -> None:
    lines = [line for line in scrape(Stats()).splitlines() if line.startswith("vllm:engine_sleep_state{")]
    assert len(lines) == 3 and all(line.endswith(" 0.0") for line in lines)


def test_without_eplb_there_is_no_gauge_of_the_balance() -> None:
    assert "eplb_balance" not in scrape(Stats())
