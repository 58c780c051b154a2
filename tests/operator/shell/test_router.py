"""Routers on a real API server: they come, lead the Service to them, and go; agents hear of it, and none is restarted."""

import pytest

from tests.operator.shell.cluster import Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")
OF_ROUTER = {
    ("Deployment", "chat-router"),
    ("PodDisruptionBudget", "chat-router"),
    ("NetworkPolicy", "chat-router"),
    ("Service", "chat-backends"),
}


async def leads_to(cluster: Cluster, label: str) -> None:
    async def check() -> bool:
        return label in (await cluster.children())["Service", "chat"]["spec"]["selector"]

    await until(check, f"the Service to select by {label}")


async def groups(cluster: Cluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in await cluster.pods() if "serving.starling.dev/group" in pod["metadata"]["labels"]}


async def test_routers_come_and_go(cluster: Cluster, start_operator: StartOperator, proxy: Proxy) -> None:
    operator = await start_operator(altered=("starling_operator.watch.audit:PERIOD=3600",))
    await cluster.apply(manifest())
    await cluster.ready("chat")
    before = await groups(cluster)
    await cluster.edit("chat", {"router": {"resources": {"requests": {"cpu": "0.5"}}}})
    await leads_to(cluster, "serving.starling.dev/router")
    await cluster.ready("chat")
    assert (await cluster.children()).keys() >= OF_ROUTER

    async def all_ready() -> bool:
        return bool((await cluster.service("chat"))["status"]["router"] == {"replicas": 2, "ready": 2})

    await until(all_ready, "both routers to be ready")
    await operator.settled()
    writes = len(proxy.writes)
    await cluster.edit("chat", {"rollout": {"maxSurge": 2}})  # wakes it
    await cluster.ready("chat")
    await operator.settled()
    assert not [write for write in proxy.writes[writes:] if "router" in write.path or "backends" in write.path]

    await cluster.edit("chat", {"router": None})
    await leads_to(cluster, "serving.starling.dev/role")

    async def gone() -> bool:
        return not (await cluster.children()).keys() & OF_ROUTER

    await until(gone, "the routers to go")
    await cluster.ready("chat")
    assert await groups(cluster) == before
    assert "router" not in (await cluster.service("chat"))["status"]
