"""One version everywhere, and what Artifact Hub reads."""

import re
import tomllib

import yaml

from tests.charts.helm import CHART, ROOT

CHART_FILE = yaml.safe_load((CHART / "Chart.yaml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_charts_version_is_the_distributions() -> None:
    assert CHART_FILE["version"] == CHART_FILE["appVersion"] == VERSION


def test_artifact_hub_sees_the_images_of_this_version() -> None:
    images = yaml.safe_load(CHART_FILE["annotations"]["artifacthub.io/images"])
    assert {item["image"] for item in images} == {f"starling-operator:{VERSION}", f"starling-agent:{VERSION}"}


def test_artifact_hubs_annotations_parse() -> None:
    listed = {"crds", "crdsExamples", "changes", "images"}
    for name in listed:
        assert isinstance(yaml.safe_load(CHART_FILE["annotations"][f"artifacthub.io/{name}"]), list)
    example = yaml.safe_load(CHART_FILE["annotations"]["artifacthub.io/crdsExamples"])[0]
    assert example["kind"] == "InferenceService"


def test_the_pinned_helm_is_named_once() -> None:
    script = (ROOT / "charts/tools/install-helm.sh").read_text()
    assert len(re.findall(r"^VERSION=\d+\.\d+\.\d+$", script, re.MULTILINE)) == 1


def test_the_chart_asks_for_the_kubernetes_that_the_check_asks_for() -> None:
    from starling_cli.checking.cluster import MIN_MINOR

    assert CHART_FILE["kubeVersion"] == f">=1.{MIN_MINOR}.0-0"
