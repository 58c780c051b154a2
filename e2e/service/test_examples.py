"""Every manifest of examples/ serves on a cluster, as it stands."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.service.kubectl import Kubectl
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import HARNESS, ROOT, ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
EACH_TIME = ("pvc-weights", "quickstart")
"""Examples that every run serves. Scenarios and tests have what the others show; --whole serves them, too."""
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in EACH_TIME else pytest.mark.whole)
    for path in sorted((ROOT / "examples").glob("*.yaml"))
]


@pytest.fixture
def manifests(request: pytest.FixtureRequest, cluster: ClusterUnderTest, kubectl: Kubectl) -> Iterator[list[dict[str, Any]]]:
    """The example's documents. A volume of one node is one of ours: the file says which two values a reader has to set."""
    documents = [document for document in yaml.safe_load_all(request.param.read_text()) if document]
    volumes = [document for document in documents if document["kind"] == "PersistentVolume"]
    for volume in volumes:
        volume["spec"]["local"]["path"] = str(folder_for(volume["metadata"]["name"], cluster))
        (term,) = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        term["matchExpressions"][0]["values"] = ["n1"]
    if any("route" in document["spec"].get("endpoint", {}) for document in documents if document["kind"] == "InferenceService"):
        install_gateway_crds(kubectl)
    yield documents
    for volume in volumes:
        kubectl("delete", "pv", volume["metadata"]["name"], "--wait=false")


def install_gateway_crds(kubectl: Kubectl) -> None:
    """Installs HTTPRoute's and InferencePool's own, as a cluster has them on which somebody writes such a service."""
    paths = subprocess.run([*HARNESS, "crds"], check=True, capture_output=True, text=True).stdout.split()
    for path in paths:
        kubectl("apply", "--server-side", "-f", path)


def folder_for(volume: str, cluster: ClusterUnderTest) -> Path:
    if cluster.folder is None:
        pytest.skip("needs a folder on a node")
    if volume == "starling-weights":
        return ROOT / "models"
    folder = cluster.folder / volume
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("manifests", EXAMPLES, indirect=True)
def test_an_example_serves(manifests: list[dict[str, Any]], kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    kubectl.apply(*manifests)
    (service,) = [manifest for manifest in manifests if manifest["kind"] == "InferenceService"]
    watched = Watched(kubectl, service["metadata"]["name"])
    watched.wait_ready()
    keys = [document["stringData"]["keys"].split()[0] for document in manifests if document["kind"] == "Secret"]
    model = service["spec"]["model"].get("servedNames", [watched.name])[0]
    traffic = Traffic(kubectl, watched, cluster.agent_image, streams=1, model=model, key=keys[0] if keys else "none")
    traffic.wait_for_more(2)
    assert failures(traffic.stop()) == []
