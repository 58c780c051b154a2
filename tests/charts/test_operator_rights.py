"""The operator at work with no more than the chart's rights: whatever it is refused would stand in its log."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from starling_operator.apply.secret_changes import AGAIN
from starling_operator.cluster.operator_key import NAME

from tests.charts.helm import ROOT, Helm, Manifest
from tests.charts.kubectl import WAIT_SECONDS, Kubectl

pytestmark = pytest.mark.timeout(240, func_only=True)

ALTERED = ROOT / "tests/operator/shell/altered.py"
SERVICE: Manifest = {
    "apiVersion": "serving.starling.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "rights"},
    "spec": {
        "model": {"source": "file:///models/any"},
        "endpoint": {"apiKeySecret": {"name": "starling-api-keys", "key": "keys"}},
    },
}


@dataclass(frozen=True, slots=True)
class Running:
    """A `starling operator` process for one namespace."""

    process: "subprocess.Popen[bytes]"
    log: Path
    kubectl: Kubectl
    namespace: str
    own: Kubectl

    def eventually(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            assert self.process.poll() is None, f"the operator ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"{what} did not come; the operator said:\n{self.log.read_text()}"
            time.sleep(0.1)

    def names(self, kind: str) -> set[str]:
        listed = self.get(kind, "-l", "serving.starling.dev/service=rights")
        return {item["metadata"]["name"] for item in listed["items"]}

    def get(self, *what: str) -> Manifest:
        found: Manifest = json.loads(self.kubectl("-n", self.namespace, "get", *what, "-o", "json"))
        return found

    def edit(self, spec: Manifest) -> None:
        self.kubectl("-n", self.namespace, "patch", "infsvc", "rights", "--type=merge", "-p", json.dumps({"spec": spec}))

    def refusals(self) -> list[str]:
        """Not what a server whose definitions were just installed answers: to come again in a second."""
        lines = [line for line in self.log.read_text().splitlines() if "TooManyRequests" not in line]
        return [line for line in lines if "forbidden" in line.lower() or "cannot be listed" in line]


@pytest.fixture(params=[pytest.param("all namespaces", marks=pytest.mark.whole), "its own"])
def operator(request: pytest.FixtureRequest, kubectl: Kubectl, helm: Helm, tmp_path: Path) -> Iterator[Running]:
    """Installed by the chart, but run here: this API server has no nodes."""
    one = request.param == "its own"
    namespace = "rights-one" if one else "rights-all"
    values: Manifest = {"watchNamespaces": [namespace]} if one else {}
    for name in {"starling-system", namespace}:
        kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}])
    objects = [item for item in helm.objects(values, release=namespace) if item["kind"] != "Deployment"]
    kubectl.apply(objects)
    kubectl.until_served("inferenceservices.serving.starling.dev")
    kubectl.until_allowed(
        f"system:serviceaccount:starling-system:{namespace}-starling-operator",
        [
            (namespace, "serving.starling.dev", "inferenceservices", "list"),
            ("starling-system", "coordination.k8s.io", "leases", "create"),
        ],
    )
    log = tmp_path / "operator.log"
    kubeconfig = kubectl.as_account("starling-system", f"{namespace}-starling-operator", tmp_path)
    process = _start(kubeconfig, log, one, namespace)
    try:
        yield Running(process, log, kubectl, namespace, own=Kubectl((kubectl.command[0], f"--kubeconfig={kubeconfig}"), kubeconfig))
    finally:
        process.terminate()
        process.wait(60)
        kubectl("delete", "clusterrolebinding", "-l", f"app.kubernetes.io/instance={namespace}")
        kubectl("delete", "namespace", namespace, "--wait=false")


def _start(kubeconfig: Path, log: Path, one: bool, namespace: str) -> "subprocess.Popen[bytes]":
    command = [
        sys.executable,
        str(ALTERED),
        "starling_operator.apply.applier:CREATE_AGAIN=1",
        "operator",
        "--agent-image=starling-agent:test",
    ]
    command += ["--http-address=127.0.0.1:0", "--api-key-secret=starling-api-keys"]
    command += [f"--namespace={namespace}"] if one else []
    environment = os.environ | {"KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": "starling-system"}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def test_a_service_lives_and_changes_with_the_charts_rights(operator: Running) -> None:
    operator.kubectl.apply([SERVICE | {"metadata": {"name": "rights", "namespace": operator.namespace}}])
    operator.eventually("the first group", lambda: len(operator.names("statefulsets")) == 1)
    [token], [group] = operator.names("secrets"), operator.get("statefulsets")["items"]
    assert token in json.dumps(group["spec"]["template"]["spec"]["volumes"])
    assert {len(operator.names(kind)) for kind in ("serviceaccounts", "pdb", "networkpolicies", "configmaps")} == {1}

    # Pods learn which Secret they have, and that it changed.
    keys = ("-n", operator.namespace, "create", "secret", "generic", "starling-api-keys")
    operator.kubectl(*keys, "--from-literal=keys=a")
    operator.eventually("the first keys", lambda: _keys(operator).startswith("starling-api-keys="))
    first = _keys(operator)
    operator.kubectl("-n", operator.namespace, "patch", "secret", "starling-api-keys", "-p", '{"stringData": {"keys": "b"}}')
    operator.eventually("the second keys", lambda: _keys(operator) not in (first, ""))
    operator.kubectl("-n", operator.namespace, "delete", "secret", "starling-api-keys")
    operator.eventually("their end", lambda: _keys(operator) == "starling-api-keys=")

    # More revisions than are kept: the oldest goes, with its ConfigMap.
    first = operator.names("configmaps")
    for number in range(5):
        before = operator.names("controllerrevisions")
        operator.edit({"model": {"maxLength": 1000 + number}})
        operator.eventually("a new revision", lambda before=before: bool(operator.names("controllerrevisions") - before))
    operator.eventually("the end of the first revision", lambda: not first & operator.names("configmaps"))

    operator.edit({"replicas": 2})
    operator.eventually("a second group", lambda: len(operator.names("statefulsets")) == 2)
    operator.edit({"replicas": 1})
    operator.eventually("its end", lambda: len(operator.names("statefulsets")) == 1)

    # What drifts is put back, and what was removed is made again.
    operator.kubectl("-n", operator.namespace, "delete", "secret", token)
    operator.kubectl("-n", operator.namespace, "label", "pdb", "rights", "app.kubernetes.io/part-of=elsewhere", "--overwrite")
    operator.eventually("the Secret, for the pod that waits", lambda: operator.names("secrets") == {token})
    operator.eventually("the label", lambda: _part_of(operator) == "starling")
    operator.eventually("the status", lambda: _status(operator).get("observedGeneration") == 8)
    assert _events(operator)
    _reads_no_secret_but_its_key(operator)
    assert operator.refusals() == []


def _keys(operator: Running) -> str:
    """Returns what all pods are told of their keys, whether for the first time or once more."""
    pods = operator.get("pods", "-l", "serving.starling.dev/service=rights")["items"]
    texts: list[str] = [pod["metadata"]["annotations"].get("serving.starling.dev/secrets", "") for pod in pods]
    found = {text.removesuffix(AGAIN) for text in texts}
    return found.pop() if len(found) == 1 else ""


def _reads_no_secret_but_its_key(operator: Running) -> None:
    """Whoever takes the operator over has no Secret of anybody, but for those with API keys by their name, and changes no pod."""
    operator.kubectl("-n", operator.namespace, "create", "secret", "generic", "theirs", "--from-literal=a=b")
    token, *_ = operator.names("secrets")
    for arguments in (["theirs"], [token], ["-l", "serving.starling.dev/service=rights"], ["theirs", "--watch"]):
        answer = operator.own.run("-n", operator.namespace, "get", "secret", *arguments)
        assert "Forbidden" in answer.stderr and not answer.stdout, arguments
    operator.own("-n", operator.namespace, "get", "secret", "--field-selector=metadata.name=starling-api-keys")
    [pod, *_] = operator.get("pods")["items"]
    answer = operator.own.run("-n", operator.namespace, "label", "pod", pod["metadata"]["name"], "a=b")
    assert "Forbidden" in answer.stderr
    assert operator.own("-n", "starling-system", "get", "secret", NAME)


def _part_of(operator: Running) -> str:
    label: str = operator.get("pdb", "rights")["metadata"]["labels"]["app.kubernetes.io/part-of"]
    return label


def _status(operator: Running) -> Manifest:
    status: Manifest = operator.get("infsvc", "rights").get("status", {})
    return status


def _events(operator: Running) -> list[Manifest]:
    events: list[Manifest] = operator.get("events", "--field-selector=involvedObject.kind=InferenceService")["items"]
    return events
