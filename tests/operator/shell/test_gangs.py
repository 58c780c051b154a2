"""Groups of two services that wait for each other's nodes, on a real API server."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.waiting import until

NAMES = ("chat", "talk")


@pytest.fixture
def admit() -> Callable[[Manifest, Agent], Agent | None]:
    """Keeps agents waiting for each other."""
    return lambda _, agent: replace(agent, report=agent.report.model_copy(update={"phase": "starting", "ready": False}))


async def test_one_of_two_services_that_hold_each_others_nodes_releases_them(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    kubelet.has_room = lambda pod: pod["metadata"]["name"].endswith("-0")
    await start_operator("--gang-patience=2", altered=("starling_operator.plan.requeue:_POLL_SECONDS=0.5",))
    for name in NAMES:
        await cluster.apply(manifest(name, parallelism={"pipeline": 2}))

    async def one_waits() -> bool:
        return any(["comes first" in (await cluster.condition(name, "Ready"))["message"] for name in NAMES])

    await until(one_waits, "one of them to release its nodes and to wait for the other", 60, cluster.pods)
    kubelet.has_room = lambda _: True

    async def have_nodes() -> bool:
        placed = [pod["metadata"]["name"].partition("-")[0] for pod in await cluster.pods() if pod["spec"].get("nodeName")]
        return sorted(placed) == ["chat", "chat", "talk", "talk"]

    await until(have_nodes, "both to have all their nodes, one after the other", 60, cluster.pods)
