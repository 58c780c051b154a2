"""Dashboard and alerts name only metrics, and labels of ours, that the agent and the operator really export."""

import json
import re
from typing import Any

import pytest
from prometheus_client.core import Metric
from starling_agent.contract.report import Report
from starling_agent.metrics.exporter import CacheShape, EngineCollector
from starling_agent.metrics.requests import RequestMetrics
from starling_agent.node.metrics import AgentCollector
from starling_engine.delta import Stats, TierStats
from starling_operator.metrics import REGISTRY
from starling_router.backend import Backends
from starling_router.metrics import RouterMetrics

from tests.charts.helm import CHART, Helm, the
from tests.charts.values import EVERYTHING

pytestmark = pytest.mark.timeout(120, func_only=True)

REPORT = Report(
    version=1,
    incarnation="a",
    agent="0.1.0",
    config_hash="",
    service="chat",
    revision="1a2b3c4",
    group="chat-1a2b3c4-0",
    node=0,
    pod="chat-1a2b3c4-0-0",
    phase="serving",
)
NAME = re.compile(r"\b(?:vllm:|starling:|starling_operator_)\w+")


def _exported() -> set[str]:
    stats = Stats(tiers={"cpu": TierStats()})
    engine, agent = EngineCollector(lambda: stats, "model", CacheShape(16), RequestMetrics()), AgentCollector(lambda: REPORT)
    router = RouterMetrics(Backends()).registry
    collected = [*engine.collect(), *agent.collect(), *router.collect(), *REGISTRY.collect()]
    return {name for metric in collected for name in _series(metric)}


def _series(metric: Metric) -> list[str]:
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
    return [metric.name + suffix for suffix in suffixes]


def _dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((CHART / "files/dashboards/starling.json").read_text())
    return board


def _queries(board: dict[str, Any]) -> list[str]:
    variables = [item["definition"] for item in board["templating"]["list"] if "definition" in item]
    return variables + [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]


def test_each_metric_of_the_dashboard_is_exported() -> None:
    named = {name for query in _queries(_dashboard()) for name in NAME.findall(query)}
    assert named - _exported() == set()


def test_the_dashboard_shows_what_matters() -> None:
    named = {name for query in _queries(_dashboard()) for name in NAME.findall(query)}
    assert {prefix for prefix in ("vllm:", "starling:", "starling_operator_") for name in named if name.startswith(prefix)} == {
        "vllm:",
        "starling:",
        "starling_operator_",
    }


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in _dashboard()["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def test_the_config_map_holds_the_dashboard_as_it_is(helm: Helm) -> None:
    config = the(helm.objects(EVERYTHING), "ConfigMap")
    assert json.loads(config["data"]["starling.json"]) == _dashboard()


def test_each_metric_of_the_alerts_is_exported(helm: Helm) -> None:
    rules = [rule for group in the(helm.objects(EVERYTHING), "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    assert {name for rule in rules for name in NAME.findall(rule["expr"])} - _exported() == set()
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] in ("critical", "warning", "info") for rule in rules)


@pytest.mark.parametrize("is_read", [True, False])
def test_an_operator_whose_metrics_nobody_reads_is_not_called_gone(helm: Helm, is_read: bool) -> None:
    values = {"prometheusRule": {"enabled": True}, "serviceMonitor": {"enabled": is_read}}
    groups = the(helm.objects(values), "PrometheusRule")["spec"]["groups"]
    named = {rule["alert"] for group in groups for rule in group["rules"]}
    assert "StarlingOperatorFails" in named and ("StarlingOperatorGone" in named) is is_read


def test_a_tier_that_is_slow_is_an_alert_of_its_own(helm: Helm) -> None:
    """It is passed by, not out of order."""
    rules = {r["alert"]: r for r in the(helm.objects(EVERYTHING), "PrometheusRule")["spec"]["groups"][0]["rules"]}
    assert "kv_tier_bypassed_total" in rules["StarlingTierSlow"]["expr"] and rules["StarlingTierSlow"]["for"] == "10m"
    assert "kv_tier_refused_total" in rules["StarlingTierOutOfOrder"]["expr"]


def test_the_dashboard_shows_what_tiers_leave_out() -> None:
    named = {name for query in _queries(_dashboard()) for name in NAME.findall(query)}
    assert {f"starling:kv_tier_{kind}_total" for kind in ("bypassed", "full", "refused", "errors", "unwritten")} <= named


def test_the_alerts_threshold_is_a_value(helm: Helm) -> None:
    rules = the(helm.objects(EVERYTHING), "PrometheusRule")["spec"]["groups"][0]["rules"]
    slow = next(rule for rule in rules if rule["alert"] == "StarlingSlowFirstToken")
    assert slow["expr"].endswith("> 2.5")
