"""Refusals of the API server are in the condition, in its own words, and disturb no other service."""

import time
from typing import Any

import pytest

from tests.operator.shell.cluster import Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")
BAD = {"spec": {"dnsPolicy": "Nonsense"}}


async def test_a_bad_overlay_is_reported_within_two_seconds(cluster: Cluster, start_operator: StartOperator, proxy: Proxy) -> None:
    operator = await start_operator()
    await cluster.apply(manifest("other"))
    await cluster.ready("other")
    # The machine is shared: one of a few.
    seconds = [await _seconds_until_stalled(cluster, "bad")]
    while min(seconds) >= 2 and len(seconds) < 9:
        seconds.append(await _seconds_until_stalled(cluster, f"bad-{len(seconds)}"))
    seconds.append(await _seconds_until_stalled(cluster, "chat"))
    assert min(seconds) < 2
    condition = await cluster.condition("chat", "Stalled")
    assert "Nonsense" in condition["message"] and "dnsPolicy" in condition["message"]
    assert (await cluster.condition("chat", "Ready"))["status"] == "False"
    assert (await cluster.condition("other", "Ready"))["status"] == "True"
    # Tried again with growing pauses only, though the status is written and seen.
    await until(lambda: _tries(proxy, 2), "another try")
    assert len(await _tries(proxy, 0)) <= 3
    assert (await operator.get("/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        ({"nodeSelecter": {"disk": "ssd"}}, "spec.template.spec.nodeSelecter"),
        ({"containers": [{"name": "agent", "resources": {"limits": {"cpu": "abc"}}}]}, "containers[agent].resources.limits.cpu"),
        ({"priority": "high"}, "spec.template.spec.priority"),
    ],
)
async def test_a_field_that_kubernetes_cannot_read_is_reported_on_a_service_that_runs(
    cluster: Cluster, start_operator: StartOperator, pod: dict[str, Any], field: str
) -> None:
    """Applies a field that the API server answers with an internal error."""
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await cluster.apply(manifest(template={"spec": pod}))

    async def is_reported() -> bool:
        condition = await cluster.condition("chat", "Stalled")
        return condition["status"] == "True" and field in condition["message"]

    await until(is_reported, "the field to be reported", 30, lambda: cluster.service("chat"))
    assert (await cluster.condition("chat", "Ready"))["status"] == "False"
    assert (await cluster.condition("chat", "Available"))["status"] == "True", "what runs goes on"


async def test_a_mended_overlay_is_applied_at_once(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest(template=BAD))

    async def stalled() -> bool:
        return bool((await cluster.condition("chat", "Stalled"))["status"] == "True")

    await until(stalled, "the condition")
    await cluster.apply(manifest())
    await cluster.ready("chat")


async def test_a_quota_is_reported(cluster: Cluster, start_operator: StartOperator) -> None:
    path = await cluster.quota({"count/statefulsets.apps": "0"})
    await start_operator()
    await cluster.apply(manifest())

    async def is_reported() -> bool:
        return "exceeded quota" in (await cluster.condition("chat", "Ready"))["message"]

    await until(is_reported, "the condition to name the quota", 60, lambda: cluster.service("chat"))
    await cluster.delete(path)
    await cluster.ready("chat")


async def test_an_agents_error_is_in_the_condition(cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [name] = kubelet.agents
    kubelet.agent(name).update(phase="restarting", healthy=False, ready=False, last_error="rank 0 ran out of memory")
    pod = next(pod for pod in await cluster.pods() if pod["metadata"]["name"] == name)
    await kubelet.set_status(pod, ready=False)

    async def is_reported() -> bool:
        condition = await cluster.condition("chat", "Ready")
        return condition["status"] == "False" and "ran out of memory" in condition["message"]

    await until(is_reported, "the agent's error", 60, lambda: cluster.service("chat"))


async def _seconds_until_stalled(cluster: Cluster, name: str) -> float:
    """Returns the seconds until a service that cannot be carried out is stalled."""
    await cluster.apply(manifest(name, template=BAD))
    began = time.monotonic()

    async def stalled() -> bool:
        return bool((await cluster.condition(name, "Stalled"))["status"] == "True")

    await until(stalled, "the condition", 60, lambda: cluster.service(name))
    return time.monotonic() - began


async def _tries(proxy: Proxy, least: int) -> list[str] | None:
    made = [request.path for request in proxy.writes if "/statefulsets/chat-" in request.path]
    return made if len(made) >= least else None
