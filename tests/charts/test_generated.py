"""What is made from elsewhere is up to date: the chart's CRD, and the plain manifests."""

import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.charts.helm import ROOT, Helm, parsed

pytestmark = pytest.mark.timeout(120, func_only=True)

PLAIN = ROOT / "deploy/starling.yaml"


def test_everything_generated_is_up_to_date(helm: Helm) -> None:
    assert helm.program  # built by now, so that the script need not wait for it
    command = [sys.executable, ROOT / "charts/tools/generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _objects() -> list[dict[str, Any]]:
    return parsed(PLAIN.read_text())


def test_the_plain_manifests_stand_alone() -> None:
    kinds = [item["kind"] for item in _objects()]
    assert kinds[0] == "Namespace"
    assert kinds.index("CustomResourceDefinition") < kinds.index("Deployment")


def test_the_plain_manifests_do_not_claim_to_be_helms() -> None:
    objects = _objects()
    assert "helm.sh/" not in yaml.safe_dump(objects)
    assert not [item for item in objects if item["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "Helm"]
