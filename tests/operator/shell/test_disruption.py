"""Evictions on a real API server, with the controller that keeps budgets."""

import secrets
from collections.abc import Callable
from dataclasses import replace

import pytest
from starling_agent.contract.report import Topology

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import PODS, Cluster, Manifest, Refused, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.waiting import until


@pytest.fixture
def node() -> str:
    """Name of a node of its own, for it is cordoned."""
    return f"emptied-{secrets.token_hex(3)}"


@pytest.fixture
def pipeline() -> int:
    """Stages of the model; each is a pod."""
    return 1


@pytest.fixture
def admit(pipeline: int) -> Callable[[Manifest, Agent], Agent | None]:
    topology = Topology(tensor=1, pipeline=pipeline, data=1, ranks=pipeline)
    return lambda _, agent: replace(agent, report=agent.report.model_copy(update={"topology": topology}))


async def evict(cluster: Cluster, pod: Manifest, seconds: int | None = None) -> bool:
    """Returns whether the API allows the eviction, with the pod's grace period or with `seconds`."""
    name = pod["metadata"]["name"]
    body: Manifest = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": cluster.namespace}}
    if seconds is not None:
        body["deleteOptions"] = {"gracePeriodSeconds": seconds}
    try:
        await cluster.call("POST", f"{PODS.format(cluster.namespace)}/{name}/eviction", body)
    except Refused as refused:
        assert refused.status == 429, refused
        return False
    return True


async def emptied(cluster: Cluster, node: str, pod: Manifest) -> None:
    """Cordons the node until the API allows the pod's eviction. All pods are on it, and their groups are replaced early."""
    await cluster.merge(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
    await until(lambda: evict(cluster, pod), "an eviction to be allowed", 30, cluster.pods)
    await cluster.merge(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": False}})


async def staying(cluster: Cluster) -> list[Manifest]:
    return [pod for pod in await cluster.pods() if "deletionTimestamp" not in pod["metadata"]]


async def test_a_draining_group_does_not_prevent_the_eviction_of_another(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    await start_operator()
    await cluster.apply(manifest(replicas=3))
    await cluster.ready("chat")
    kubelet.draining = True
    await cluster.edit("chat", {"replicas": 2})

    async def one_drains() -> bool:
        return len(await staying(cluster)) == 2

    await until(one_drains, "a group to drain", 30, cluster.pods)
    await cluster.ready("chat")
    other = (await staying(cluster))[0]
    await until(lambda: evict(cluster, other), "an eviction of another group to be allowed", 20, cluster.pods)
    assert len(await cluster.pods()) >= 3, "the first still drains"


async def test_an_only_group_is_evicted_when_another_serves(
    cluster: Cluster, kubelet: Kubelet, node: str, start_operator: StartOperator
) -> None:
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [only] = await cluster.pods()
    assert not await evict(cluster, only)
    kubelet.draining = True  # one that ends at once may be recreated in its place before the operator has seen it go
    await emptied(cluster, node, only)

    async def another_serves() -> bool:
        groups = (await cluster.service("chat"))["status"]["groups"]
        return [(group["ready"], group["name"] in only["metadata"]["name"]) for group in groups] == [(True, False)]

    await until(another_serves, "the other group to be all there is", 30, lambda: cluster.service("chat"))


async def test_a_quota_that_refuses_another_group_holds_up_no_eviction(
    cluster: Cluster, kubelet: Kubelet, node: str, start_operator: StartOperator
) -> None:
    del kubelet
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await cluster.quota({"count/statefulsets.apps": "1"})
    [only] = await cluster.pods()
    await emptied(cluster, node, only)
    await cluster.ready("chat")


@pytest.mark.parametrize("pipeline", [2])
@pytest.mark.parametrize(("which", "seconds"), [(0, None), (1, 40)])
async def test_a_gang_drains_as_a_whole_and_nothing_is_counted(
    which: int, seconds: int | None, pipeline: int, cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    await start_operator()
    await cluster.apply(manifest(parallelism={"pipeline": pipeline}, rollout={"maxUnavailable": 1}))
    await cluster.ready("chat")
    kubelet.draining = True
    pods = sorted(await cluster.pods(), key=lambda pod: str(pod["metadata"]["name"]))
    grace = pods[0]["spec"]["terminationGracePeriodSeconds"]
    await until(lambda: evict(cluster, pods[which], seconds), "an eviction to be allowed", 30, cluster.pods)

    async def another_group() -> bool:
        return len(await cluster.pods()) == 4

    await until(another_group, "another group to come", 30, cluster.pods)
    names, uids = ({str(pod["metadata"][field]) for pod in pods} for field in ("name", "uid"))

    async def graces() -> list[int | None]:
        old = {pod["metadata"]["name"]: pod["metadata"] for pod in await cluster.pods() if pod["metadata"]["name"] in names}
        assert {pod["uid"] for pod in old.values()} == uids
        return [old[name].get("deletionGracePeriodSeconds") for name in sorted(old)]

    async def both_drain() -> bool:
        return None not in await graces()

    async def both_know() -> bool:
        return all(0 < (kubelet.agents[name].ends_in or 0) <= (seconds or grace) for name in names)

    await until(both_drain, "the other pod to drain as well", 30, cluster.pods)
    assert await graces() == [grace, seconds or grace]
    await until(both_know, "both agents to be notified when the first of them is killed", 30, cluster.pods)
    await cluster.ready("chat")
    [group] = (await cluster.service("chat"))["status"]["groups"]
    assert group.get("restarts", 0) == 0
    kubelet.draining = False
