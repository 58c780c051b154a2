"""A store that services share: its master deployed by the chart, named by `spec.kvCache.store`."""

import subprocess
import time

import pytest

from e2e.conftest import image_values
from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.test_kv_tier import PROMPTS, TOKENS, ask, of_tier, only_pod
from e2e.service.watched import Watched
from e2e.under_test import ROOT, ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
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
    return f"mooncake://{MASTER}.{kubectl.namespace}:50051?segment=64MiB&timeout=10"


def stored(kubectl: Kubectl, service: Watched) -> float:
    return of_tier(kubectl, only_pod(service), "store", "stored_bytes_total")


def until_joined(kubectl: Kubectl, service: Watched, prompts: range) -> float:
    """Asks what nobody else asks until the store takes what is computed; the bytes that were stored when no more came."""
    for prompt in prompts:
        ask(kubectl, service, only_pod(service), prompt)
        before, now = -1.0, 0.0
        while before != now:
            time.sleep(2)
            before, now = now, stored(kubectl, service)
        if now:
            return now
    raise AssertionError(f"{service.name} has not joined the store\n" + kubectl("logs", only_pod(service), "--tail=30"))


@pytest.mark.whole  # tests/engine has two engines and a store
def test_a_service_finds_what_another_has_computed(service: MakeService, kubectl: Kubectl, store: str) -> None:
    """While both live: the store's memory is that of their pods."""
    first, second = (service(name, kvCache={"store": store}) for name in ("first", "second"))
    for one in (first, second):
        one.wait_ready()
    before = until_joined(kubectl, first, range(200, 210))
    computed = [ask(kubectl, first, only_pod(first), prompt) for prompt in PROMPTS]
    assert {each["cached"] for each in computed} == {0}
    wait_until(
        "it is in the store",
        lambda: stored(kubectl, first) >= before + len(PROMPTS) * LEAST_BYTES,
        60,
        lambda: kubectl("logs", only_pod(first), "--tail=30"),
    )
    until_joined(kubectl, second, range(300, 310))
    answers = [ask(kubectl, second, only_pod(second), prompt) for prompt in PROMPTS]
    assert [each["text"] for each in answers] == [each["text"] for each in computed]
    found = max(answers, key=lambda each: each["cached"])
    assert found["cached"] >= TOKENS - 128
    assert of_tier(kubectl, only_pod(second), "store", "hits_total") > 0
    print(
        f"{TOKENS} tokens, first token: computed after {1000 * computed[0]['ttft']:.0f} ms,"
        f" by another service from the store after {1000 * found['ttft']:.0f} ms"
    )
