"""The harness itself: pods of the checkout run in a strict namespace and find each other, nodes break and mend, nothing stays."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.under_test import HARNESS, ClusterUnderTest

pytestmark = pytest.mark.timeout(600)

SERVE = "python -c 'import starling_engine' && cd /tmp && hostname > name && exec python -m http.server 8080"
ASK = "import urllib.request; print(urllib.request.urlopen('http://{host}/name', timeout=5).read().decode().strip())"
LABELS = {"app": "web"}
STRICT = {"pod-security.kubernetes.io/enforce": "restricted"}
CONTAINER = {
    "name": "web",
    "image": "localhost/starling-thin:1",
    "command": ["sh", "-c", SERVE],
    "readinessProbe": {"httpGet": {"path": "/name", "port": 8080}, "periodSeconds": 1},
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    },
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}
POD = {
    "terminationGracePeriodSeconds": 1,
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": LABELS},
        }
    ],
    "containers": [CONTAINER],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
}
OBJECTS = [
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict", "labels": STRICT}},
    {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "web", "namespace": "strict"},
        "spec": {
            "serviceName": "web",
            "replicas": 2,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": POD},
        },
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "strict"},
        "spec": {"clusterIP": "None", "selector": LABELS, "ports": [{"port": 8080}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "front", "namespace": "strict"},
        "spec": {"selector": LABELS, "ports": [{"port": 80, "targetPort": 8080}]},
    },
]


def kubectl(cluster: ClusterUnderTest, *arguments: str, text: str | None = None) -> str:
    command = [cluster.kubectl, f"--kubeconfig={cluster.kubeconfig}", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until(is_true: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.3)


@pytest.fixture(scope="module")
def web(cluster: ClusterUnderTest) -> Iterator[ClusterUnderTest]:
    if cluster.folder is None:
        pytest.skip("the harness is not used")
    kubectl(cluster, "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": OBJECTS}))
    kubectl(cluster, "-n", "strict", "rollout", "status", "statefulset/web", "--timeout=180s")
    yield cluster
    kubectl(cluster, "delete", "namespace", "strict", "--wait=false")


def test_pods_spread_and_reach_each_other_by_service_and_by_name(web: ClusterUnderTest) -> None:
    nodes = kubectl(web, "-n", "strict", "get", "pods", "-o", "jsonpath={.items[*].spec.nodeName}").split()
    assert sorted(nodes) == ["n1", "n2"]
    # The nodes hear of a Service's pods some time after these are ready.
    wait_until(lambda: {_answer(web, "front") for _ in range(12)} == {"web-0", "web-1"})
    wait_until(lambda: _answer(web, "web-1.web:8080") == "web-1")


@pytest.mark.whole
def test_a_policy_keeps_out_whom_it_does_not_name(web: ClusterUnderTest) -> None:
    """On the same node and on another, by address and by Service."""
    metadata = {"name": "nobody", "namespace": "strict"}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata}
    spec = {"podSelector": {"matchLabels": LABELS}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "none"}}}]}]}
    kubectl(web, "apply", "-f", "-", text=json.dumps(policy | {"spec": spec}))
    wait_until(lambda: _answer(web, "web-0.web:8080") is None)
    assert _answer(web, "front") is None
    kubectl(web, "-n", "strict", "delete", "networkpolicy", "nobody")
    wait_until(lambda: _answer(web, "web-0.web:8080") == "web-0")


@pytest.mark.whole
def test_a_node_without_power_comes_back(web: ClusterUnderTest) -> None:
    web.harness("stop-node", "1")
    wait_until(lambda: _ready(web) == {"n1": False, "n2": True})
    web.harness("start-node", "1")
    wait_until(lambda: _ready(web) == {"n1": True, "n2": True})
    kubectl(web, "-n", "strict", "rollout", "status", "statefulset/web", "--timeout=180s")
    wait_until(lambda: {_answer(web, "front") for _ in range(12)} == {"web-0", "web-1"})


@pytest.mark.whole
@pytest.mark.parametrize("seconds", [0.5, 3, 6])
def test_a_killed_start_leaves_nothing(seconds: float) -> None:
    """And the next start takes the same folder."""
    folder = Path(f"/tmp/starling-killed-{os.getpid()}")
    start = subprocess.Popen([*HARNESS, "up", str(folder)], stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    start.send_signal(signal.SIGKILL)
    start.wait()
    try:
        subprocess.run([*HARNESS, "up", str(folder), "--nodes", "1"], check=True)
    finally:
        subprocess.run([*HARNESS, "down", str(folder)], check=True)
    assert not folder.exists()
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    assert str(folder) not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert not [process for process in Path("/proc").glob("[0-9]*") if str(folder).encode() in _environment(process)]


def _ask(cluster: ClusterUnderTest, host: str) -> str:
    return kubectl(cluster, "-n", "strict", "exec", "web-1", "--", "python", "-c", ASK.format(host=host)).strip()


def _answer(cluster: ClusterUnderTest, host: str) -> str | None:
    """None: nobody answered."""
    try:
        return _ask(cluster, host)
    except AssertionError:
        return None


def _ready(cluster: ClusterUnderTest) -> dict[str, bool]:
    nodes = json.loads(kubectl(cluster, "get", "nodes", "-o", "json"))["items"]
    return {node["metadata"]["name"]: _is_ready(node) for node in nodes}


def _is_ready(node: dict[str, dict[str, list[dict[str, str]]]]) -> bool:
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in node["status"]["conditions"])


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""
