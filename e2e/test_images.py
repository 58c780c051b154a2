"""A cluster runs what the Dockerfiles build: the operator, a router and an agent from their real images."""

import json
import subprocess

import pytest

from e2e.images import AGENT, OPERATOR, build_and_load, harness
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import OPERATOR_NAMESPACE, ROOT, ClusterUnderTest

OPERATOR_MEGABYTES = 345
"""Kubernetes' two clients with their bytecode take 126 of them, what routers need 75, and what picks for gateways 68."""

# Wheels of torch with CUDA's libraries are gigabytes: built, saved and imported once.
pytestmark = pytest.mark.timeout(1800)


def megabytes(image: str) -> float:
    done = subprocess.run(["podman", "image", "inspect", image], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)[0]["Size"]) / 1e6


@pytest.fixture(scope="module")
def built(cluster: ClusterUnderTest) -> ClusterUnderTest:
    """A cluster with both images."""
    if cluster.folder is None:
        pytest.skip("images are brought to the nodes of a cluster of our own; another one runs its own images in every scenario")
    build_and_load(cluster.folder)
    return cluster


def test_the_operator_is_small(built: ClusterUnderTest) -> None:
    del built
    base = harness("image", "base").split()[-1]
    added = megabytes(OPERATOR) - megabytes(base)
    print(f"operator: {added:.0f} MB on top of its base; agent: {megabytes(AGENT) - megabytes(base):.0f} MB")
    assert added < OPERATOR_MEGABYTES


def test_the_built_images_serve(built: ClusterUnderTest, operator: str, helm: str, kubectl: Kubectl) -> None:
    before = operator_pods(kubectl)
    upgrade = [helm, "upgrade", "starling", str(ROOT / "charts" / "starling"), "-n", operator, "--reuse-values"]
    options = [f"--kubeconfig={built.kubeconfig}", "--set-string=image.tag=built", "--wait", "--timeout=3m"]
    done = subprocess.run([*upgrade, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wait_until("the operator's old pods are gone", lambda: not before & operator_pods(kubectl), 60)
    real = Watched(kubectl, "real")
    real.apply(image=AGENT, router={"replicas": 1}, template={"spec": {"nodeSelector": {"kubernetes.io/hostname": "n1"}}})
    print(f"apply to Ready from the built images: {real.wait_ready(180):.1f} s")
    (pod,) = real.pods()
    assert pod["spec"]["containers"][0]["image"] == AGENT
    traffic = Traffic(kubectl, real, built.agent_image)
    traffic.wait_for_more(5)
    assert failures(traffic.stop()) == []


def operator_pods(kubectl: Kubectl) -> set[str]:
    found = Kubectl(kubectl.program, kubectl.kubeconfig, OPERATOR_NAMESPACE).find("pods")
    return {pod["metadata"]["uid"] for pod in found}
