"""What the API server refuses stands in the condition, in its own words, and disturbs nobody else."""

import time
from typing import Any

import pytest

from tests.operator.shell.cluster import Cluster, manifest, until
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.proxy import Proxy

pytestmark = pytest.mark.usefixtures("kubelet")
BAD = {"spec": {"dnsPolicy": "Nonsense"}}


async def test_a_bad_overlay_is_told_within_two_seconds(cluster: Cluster, start_operator: StartOperator, proxy: Proxy) -> None:
    operator = await start_operator()
    await cluster.apply(manifest("other"))
    await cluster.ready("other")
    # The machine is shared: the best of three.
    assert min([await _told(cluster, name) for name in ("bad", "worse", "chat")]) < 2
    condition = await cluster.condition("chat", "Stalled")
    assert "Nonsense" in condition["message"] and "dnsPolicy" in condition["message"]
    assert (await cluster.condition("chat", "Ready"))["status"] == "False"
    assert (await cluster.condition("other", "Ready"))["status"] == "True"
    # Tried again with growing pauses only, though the status is written and seen.
    await until(lambda: _tries(proxy, 2), "another try")
    assert len(await _tries(proxy, 0)) <= 3
    assert (await operator.ask("/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        ({"nodeSelecter": {"disk": "ssd"}}, "spec.template.spec.nodeSelecter"),
        ({"containers": [{"name": "agent", "resources": {"limits": {"cpu": "abc"}}}]}, "containers[agent].resources.limits.cpu"),
        ({"priority": "high"}, "spec.template.spec.priority"),
    ],
)
async def test_a_field_that_kubernetes_cannot_read_is_told_on_a_service_that_runs(
    cluster: Cluster, start_operator: StartOperator, pod: dict[str, Any], field: str
) -> None:
    """The API server calls it an internal error of its own."""
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await cluster.apply(manifest(template={"spec": pod}))

    async def is_told() -> bool:
        condition = await cluster.condition("chat", "Stalled")
        return condition["status"] == "True" and field in condition["message"]

    await until(is_told, "the field to be told", 30, lambda: cluster.service("chat"))
    assert (await cluster.condition("chat", "Ready"))["status"] == "False"
    assert (await cluster.condition("chat", "Available"))["status"] == "True", "what runs goes on"


async def test_a_mended_overlay_is_taken_at_once(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest(template=BAD))

    async def stalled() -> bool:
        return bool((await cluster.condition("chat", "Stalled"))["status"] == "True")

    await until(stalled, "the condition")
    await cluster.apply(manifest())
    await cluster.ready("chat")


async def test_a_quota_is_told(cluster: Cluster, start_operator: StartOperator) -> None:
    path = await cluster.quota({"count/statefulsets.apps": "0"})
    await start_operator()
    await cluster.apply(manifest())

    async def is_told() -> bool:
        return "exceeded quota" in (await cluster.condition("chat", "Ready"))["message"]

    await until(is_told, "the condition to name the quota", 60, lambda: cluster.service("chat"))
    await cluster.delete(path)
    await cluster.ready("chat")


async def test_an_agents_own_words_are_in_the_condition(cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [name] = kubelet.agents
    kubelet.agent(name).say(phase="restarting", healthy=False, ready=False, last_error="rank 0 ran out of memory")
    pod = next(pod for pod in await cluster.pods() if pod["metadata"]["name"] == name)
    await kubelet.set_status(pod, ready=False)

    async def is_told() -> bool:
        condition = await cluster.condition("chat", "Ready")
        return condition["status"] == "False" and "ran out of memory" in condition["message"]

    await until(is_told, "the agent's words", 60, lambda: cluster.service("chat"))


async def _told(cluster: Cluster, name: str) -> float:
    """Seconds until a service that cannot be carried out says so."""
    await cluster.apply(manifest(name, template=BAD))
    began = time.monotonic()

    async def stalled() -> bool:
        return bool((await cluster.condition(name, "Stalled"))["status"] == "True")

    await until(stalled, "the condition", 60, lambda: cluster.service(name))
    return time.monotonic() - began


async def _tries(proxy: Proxy, least: int) -> list[str] | None:
    made = [request.path for request in proxy.writes if "/statefulsets/chat-" in request.path]
    return made if len(made) >= least else None
