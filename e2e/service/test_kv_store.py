"""A store that services share: its master deployed by the chart, named by `spec.kvCache.store`."""

import subprocess

import pytest

from e2e.conftest import image_values
from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.test_kv_tier import TOKENS, ask, of_tier, only_pod
from e2e.under_test import ROOT, ClusterUnderTest

pytestmark = pytest.mark.timeout(300)
MASTER = "shared-starling-mooncake"
LEAST_BYTES = (TOKENS - 128) * 2560
"""Of the model's keys and values: 5 layers of 2 heads of 64, in bfloat16."""


@pytest.fixture
def store(cluster: ClusterUnderTest, kubectl: Kubectl, helm: str) -> str:
    """URL of a store of the test's own namespace."""
    command = [helm, "template", "shared", str(ROOT / "charts" / "starling"), "--namespace", kubectl.namespace]
    command += ["--set=mooncake.enabled=true", *image_values("agent.image", cluster.agent_image)]
    command += ["--show-only=templates/mooncake.yaml"]
    kubectl("apply", "-f", "-", stdin=subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    kubectl("rollout", "status", f"deployment/{MASTER}", "--timeout=90s")
    return f"mooncake://{MASTER}.{kubectl.namespace}:50051?segment=64MiB"


def test_a_service_finds_what_another_has_computed(service: MakeService, kubectl: Kubectl, store: str) -> None:
    """While both live: the store's memory is that of their pods."""
    first, second = (service(name, kvCache={"store": store}) for name in ("first", "second"))
    for one in (first, second):
        one.wait_ready(120)
    computed = ask(kubectl, first, only_pod(first))
    assert computed["cached"] == 0
    wait_until(
        "it is in the store",
        lambda: of_tier(kubectl, only_pod(first), "store", "stored_bytes_total") >= LEAST_BYTES,
        30,
        lambda: kubectl("logs", only_pod(first), "--tail=30"),
    )
    found = ask(kubectl, second, only_pod(second))
    assert found["text"] == computed["text"]
    assert found["cached"] >= TOKENS - 128
    assert of_tier(kubectl, only_pod(second), "store", "hits_total") > 0
    print(
        f"{TOKENS} tokens, first token: computed after {1000 * computed['ttft']:.0f} ms,"
        f" by another service from the store after {1000 * found['ttft']:.0f} ms"
    )
