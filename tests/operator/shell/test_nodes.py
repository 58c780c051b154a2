"""Pods that a taint evicts: force-deleted from a node that is gone, left to their streams on one that lives."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from starling_operator.plan.observed import Pod
from starling_operator.watch.nodes import KILL_OVERDUE_SECONDS, NodeHealth, is_lost, read_health

from tests.operator.shell.agents import AgentServer
from tests.operator.shell.cluster import Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import NODE, Kubelet
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

NOW = 1_800_000_000.0
EVICTED = Pod(
    name="p",
    uid="u",
    group="g",
    revision="r",
    number=0,
    cluster_node="n",
    evicted_by_taint=True,
    toleration_seconds=30.0,
    deleted_at=NOW - 40,
)
SOON = {
    "spec": {
        "tolerations": [
            {"key": f"node.kubernetes.io/{trouble}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
            for trouble in ("not-ready", "unreachable")
        ]
    }
}


@pytest.mark.parametrize(
    ("health", "fields", "lost"),
    [
        (NodeHealth(None), {}, False),
        (NodeHealth(None), {"grace_ends_at": NOW - 1000, "unreported_since": NOW - 1000}, False),
        (NodeHealth(NOW - 31), {}, True),
        (NodeHealth(NOW - 29), {}, False),
        (NodeHealth(NOW - 29), {"toleration_seconds": 0.0}, True),
        (NodeHealth(0.0), {"report_age": 0.5}, True),
        (None, {}, False),
        (None, {"unreported_since": NOW - 31}, True),
        (None, {"unreported_since": NOW - 29}, False),
        (None, {"grace_ends_at": NOW - KILL_OVERDUE_SECONDS - 1}, True),
        (None, {"grace_ends_at": NOW - KILL_OVERDUE_SECONDS - 1, "report_age": 1.0}, False),
        (None, {"grace_ends_at": NOW - KILL_OVERDUE_SECONDS + 1}, False),
        (None, {"grace_ends_at": NOW + 300, "report_age": 400.0}, False),
    ],
)
def test_which_pods_are_lost(health: NodeHealth | None, fields: dict[str, Any], lost: bool) -> None:
    assert is_lost(replace(EVICTED, **fields), health, NOW) is lost


@pytest.mark.parametrize(
    ("conditions", "down_since"),
    [
        ([{"type": "Ready", "status": "True"}], None),
        ([{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2027-01-15T08:00:00Z"}], NOW),
        ([{"type": "Ready", "status": "False", "lastTransitionTime": "2027-01-15T08:00:00Z"}], NOW),
        ([{"type": "DiskPressure", "status": "False"}], 0.0),
        ([], 0.0),
    ],
)
def test_a_nodes_health(conditions: list[Manifest], down_since: float | None) -> None:
    assert read_health({"status": {"conditions": conditions}}) == NodeHealth(down_since)


@pytest.fixture
def node() -> str:
    return f"doomed-{secrets.token_hex(3)}"


@pytest.fixture
async def others_live(cluster: Cluster, kubelet: Kubelet, node: str) -> AsyncIterator[None]:
    """Keeps another node alive: where all nodes are down at once, Kubernetes blames the network and evicts no pod."""
    del kubelet  # it has made its own node
    await cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}, "/api/v1/nodes")
    server = AgentServer(64 + os.getpid() % 128)
    peer = Kubelet(cluster, server, lambda *_: None)
    task = asyncio.create_task(peer.send_heartbeats())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await cluster.delete(f"/api/v1/nodes/{node}")


@pytest.fixture(params=["readable", "unreadable"])
def nodes(request: pytest.FixtureRequest, proxy: Proxy) -> Iterator[str]:
    """Runs the test with and without the right to read nodes, which an installation for some namespaces lacks."""
    proxy.refuse = "/api/v1/nodes" if request.param == "unreadable" else ""
    yield request.param


@pytest.mark.usefixtures("others_live", "nodes")
async def test_emptying_a_live_node_cuts_no_stream(
    cluster: Cluster, kubelet: Kubelet, node: str, start_operator: StartOperator, proxy: Proxy
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [pod] = await cluster.pods()
    kubelet.draining = True
    taint = {"key": "maintenance", "effect": "NoExecute"}
    await cluster.merge(f"/api/v1/nodes/{node}", {"spec": {"taints": [taint]}})

    async def is_evicted() -> bool:
        return "DeletionByTaintManager" in await _reasons(cluster, pod)

    await until(is_evicted, "the taint to evict the pod", 60, cluster.pods)
    # As an agent that drains: unready by its own probe.
    await kubelet.set_status(pod, ready=False)

    async def is_read() -> bool:
        return any(request.path == f"/api/v1/nodes/{node}" for request in proxy.requests)

    await until(is_read, "the operator to read the node", 60, cluster.pods)
    await operator.more_runs(await operator.metric("starling_operator_reconcile_total"))
    assert await is_evicted(), "its streams were cut off"
    assert [request for request in proxy.writes if request.method == "DELETE" and "/pods/" in request.path] == []
    await cluster.merge(f"/api/v1/nodes/{node}", {"spec": {"taints": []}})
    kubelet.draining = False
    await cluster.ready("chat")


@pytest.mark.whole
@pytest.mark.usefixtures("others_live")
async def test_a_pod_of_a_node_that_is_down_is_force_deleted(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    await start_operator()
    await cluster.apply(manifest(template=SOON))
    await cluster.ready("chat")
    [pod] = await cluster.pods()
    kubelet.draining = kubelet.holding = True
    await kubelet.set_node_ready("False")
    await _is_replaced(cluster, pod, 60)


@pytest.mark.whole
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("others_live")
async def test_where_nodes_may_not_be_read_the_node_controllers_mark_decides(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator, proxy: Proxy
) -> None:
    proxy.refuse = "/api/v1/nodes"
    operator = await start_operator()
    await cluster.apply(manifest(template=SOON))
    await cluster.ready("chat")
    [pod] = await cluster.pods()
    kubelet.draining = kubelet.holding = True
    kubelet.node_ready = ""
    # Kubernetes gives a silent kubelet 50 seconds; the tests' own cluster ten.
    await _is_replaced(cluster, pod, 100)
    assert "nodes may not be read" in operator.log.read_text()


async def _is_replaced(cluster: Cluster, pod: Manifest, seconds: float) -> None:
    """Waits until it is gone, and another one is there: of the same name, or of a group that replaces its own."""

    async def is_another() -> bool:
        found = {one["metadata"]["uid"] for one in await cluster.pods()}
        return bool(found) and pod["metadata"]["uid"] not in found

    await until(is_another, "another pod in its place", seconds, cluster.pods)


async def _reasons(cluster: Cluster, pod: Manifest) -> list[str]:
    """Returns reasons of the conditions of exactly this pod; none when it is gone."""
    found = [one for one in await cluster.pods() if one["metadata"]["uid"] == pod["metadata"]["uid"]]
    return [condition.get("reason", "") for one in found for condition in one["status"]["conditions"]]
