"""The commit of a revision, on a real API server: agents report their own, the operator chooses one and notifies all agents."""

from collections.abc import Callable

import pytest

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.waiting import until

HUB = {"model": {"source": "hf://org/name"}}
COMMITS = {"0": "a" * 40, "1": "b" * 40}


@pytest.fixture
def admit() -> Callable[[Manifest, Agent], Agent | None]:
    """Each agent resolved the name at another time, and waits for the operator."""

    def waits(_: Manifest, agent: Agent) -> Agent:
        commit = COMMITS[agent.report.group.rpartition("-")[2]]
        agent.update(phase="starting", ready=False, token_seen=False, commit=commit)
        return agent

    return waits


async def test_a_moved_repository_gives_all_groups_one_commit_over_restarts(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest(replicas=2, **HUB))

    async def all_notified() -> bool:
        return len(kubelet.agents) == 2 and all(agent.commit for agent in kubelet.agents.values())

    await until(all_notified, "both agents to be notified of a commit")
    [commit] = {agent.commit for agent in kubelet.agents.values()}
    written = [child for (kind, name), child in (await cluster.children()).items() if kind == "ConfigMap" and name.endswith("-pin")]
    assert [(one["data"], one["immutable"]) for one in written] == [({"commit": commit}, True)]

    for agent in kubelet.agents.values():
        agent.update(phase="serving", ready=True, token_seen=True, commit=commit, weights="1" * 64)
    for pod in await cluster.pods():
        await kubelet.set_status(pod)
    await cluster.ready("chat")
    assert await operator.stop() == 0
    for agent in kubelet.agents.values():
        agent.commit = None
    await start_operator()
    await until(all_notified, "both agents to be notified by the next operator")
    assert {agent.commit for agent in kubelet.agents.values()} == {commit}

    group, other = sorted(kubelet.agents.items())[1]
    other.update(weights="2" * 64)

    async def refused() -> bool:
        condition = await cluster.condition("chat", "Ready")
        return condition["status"] == "False" and f"{group}: serves other weights" in condition["message"]

    await until(refused, "other weights to be reported, by the pod's name", shown=lambda: cluster.service("chat"))
