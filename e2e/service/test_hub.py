"""Weights from a hub where the name of a repository means another commit each time that somebody asks."""

import re
from pathlib import Path

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest
from e2e.service.watched import MODEL, SECURITY, Watched
from e2e.under_test import ROOT, ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
HUB = "tests/agent/node/hub.py"
PORT = 8000


@pytest.fixture
def hub(kubectl: Kubectl, cluster: ClusterUnderTest) -> Manifest:
    """`spec.template` of services that load from a hub, which serves in the test's own namespace."""
    common: Manifest = {"apiVersion": "v1", "metadata": {"name": "hub", "labels": {"app": "hub"}}}
    programs = {"hub.py": (ROOT / HUB).read_text(), "main.py": Path(__file__).with_name("hub.py").read_text()}
    files = [{"key": "hub.py", "path": HUB}, {"key": "main.py", "path": "main.py"}]
    container = {
        "name": "hub",
        "image": cluster.agent_image,
        "command": ["python", "/hub/main.py", MODEL.removeprefix("file://"), str(PORT)],
        # A question for its main branch would move that.
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "programs", "mountPath": "/hub"}],
        "securityContext": SECURITY,
    }
    pod = {
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "programs", "configMap": {"name": "hub", "items": files}}],
    }
    kubectl.apply(
        common | {"kind": "ConfigMap", "data": programs},
        common | {"kind": "Service", "spec": {"selector": {"app": "hub"}, "ports": [{"port": PORT}]}},
        common | {"kind": "Pod", "spec": pod},
    )
    kubectl("wait", "--for=condition=Ready", "pod/hub", "--timeout=90s")
    endpoint = {"name": "HF_ENDPOINT", "value": f"http://hub.{kubectl.namespace}:{PORT}"}
    return {"spec": {"containers": [{"name": "agent", "env": [endpoint]}]}}


def pinned(service: Watched) -> str:
    """The commit that is written down for the newest revision."""
    revision = service.now["status"]["revision"]["target"]
    commit: str = service.kubectl.get("configmap", f"{service.name}-{revision}-pin")["data"]["commit"]
    return commit


def loaded(kubectl: Kubectl) -> list[str]:
    """The commits of the weights that the hub has sent, one for each pod so far."""
    return re.findall(r"GET /org/name/resolve/(\w+)/model\.safetensors", kubectl("logs", "hub"))


def test_all_pods_of_a_revision_load_one_commit_though_the_repository_moves(
    service: MakeService, kubectl: Kubectl, hub: Manifest
) -> None:
    chat = service(model={"source": "hf://org/name"}, replicas=2, template=hub)
    took = chat.wait_ready()
    first = pinned(chat)
    assert loaded(kubectl) == [first] * 2
    print(f"apply to Ready, of two pods that load from a hub: {took:.1f} s")

    kubectl("scale", "infsvc", chat.name, "--replicas=3")
    chat.wait_ready()
    assert (pinned(chat), loaded(kubectl)) == (first, [first] * 3), "it started when the name meant another one"

    chat.patch(replicas=1, engine={"maxSequences": 8})
    chat.wait_ready()
    second = pinned(chat)
    assert second != first and loaded(kubectl) == [*[first] * 3, second], "newer weights come with another revision"
