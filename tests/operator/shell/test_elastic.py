"""Changes of size on a real API server, with agents that serve the admin endpoint: undisturbed, cut short, refused, lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import SCALES, SERVICES, Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.leaders import Groups, Member
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.operator.shell.test_lease import LEASE
from tests.waiting import until

PHASES = ("waiting", "preparing", "committing", "releasing")


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def admit(groups: Groups) -> Callable[[Manifest, Agent], Agent | None]:
    return groups.admit


@pytest.fixture(autouse=True)
async def moving(groups: Groups, cluster: Cluster, kubelet: Kubelet) -> AsyncIterator[None]:
    task = asyncio.create_task(groups.run(cluster, kubelet))
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def elastic(size: int = 2, **spec: Any) -> Manifest:
    return manifest(parallelism={"expert": size, "elastic": {"min": 1, "max": 6}}, **spec)


async def resize(cluster: Cluster, size: int) -> None:
    await cluster.edit("chat", {"parallelism": {"expert": size}})


async def group_of(cluster: Cluster) -> Manifest:
    found: Manifest = (await cluster.service("chat"))["status"]["groups"][0]
    return found


async def in_phase(cluster: Cluster, phase: str) -> None:
    async def check() -> bool:
        status = (await cluster.service("chat")).get("status", {})
        return any(group.get("operation", {}).get("phase") == phase for group in status.get("groups", ()))

    await until(check, f"phase {phase}", 60, lambda: cluster.service("chat"))


async def identities(cluster: Cluster) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await cluster.pods()}


async def leader(cluster: Cluster, groups: Groups) -> Member:
    return groups.leader((await group_of(cluster))["name"])


async def scale_object(cluster: Cluster) -> Manifest:
    return await cluster.call("GET", f"{SCALES.format(cluster.namespace)}/chat")


async def test_a_live_group_grows_and_shrinks(cluster: Cluster, groups: Groups, start_operator: StartOperator) -> None:
    operator = await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    first, name = await identities(cluster), (await group_of(cluster))["name"]
    assert len(first) == 2

    await resize(cluster, 4)
    await cluster.ready("chat")
    grown, group = await identities(cluster), await group_of(cluster)
    assert (len(grown), grown | first) == (4, grown)
    assert (group["name"], group["effective"], group["topology"]) == (name, {"data": 4, "expert": 4}, "TP1 PP1 DP4 EP4")
    operation = group["operation"]
    assert (operation["source"], operation["target"], operation["phase"]) == (
        {"data": 2, "expert": 2},
        {"data": 4, "expert": 4},
        "done",
    )
    assert operation["seconds"]["committing"] == 0.25

    await resize(cluster, 1)
    await cluster.ready("chat")

    async def is_alone() -> bool:
        return len(await identities(cluster)) == 1

    await until(is_alone, "the pods that left to end")
    assert (await identities(cluster)).items() <= first.items()
    calls = (await leader(cluster, groups)).received
    # Until the leader reports it, the same call is sent again.
    assert [(method, data) for method, _, data in dict.fromkeys(calls)] == [("PUT", 2), ("PUT", 4), ("PUT", 1)]

    async def are_measured() -> bool:
        """Comes true a moment after the status is written."""
        return await operator.metric("starling_operator_elastic_operation_seconds_count") == 3 * 4

    await until(are_measured, "each phase of each change to be measured")

    async def are_reported() -> bool:
        events = await cluster.call("GET", f"/apis/events.k8s.io/v1/namespaces/{cluster.namespace}/events")
        return [event["reason"] for event in events["items"]].count("Resized") == 3

    await until(are_reported, "an event for each change")


async def test_it_is_available_and_reports_its_phase(cluster: Cluster, groups: Groups, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    for phase in PHASES[1:3]:
        groups.held_phase = phase
        await resize(cluster, 4 if phase == "preparing" else 2)
        await in_phase(cluster, phase)
        ready, available = await cluster.condition("chat", "Ready"), await cluster.condition("chat", "Available")
        assert (ready["status"], ready["reason"], available["status"]) == ("False", "Scaling", "True")
        assert ready["message"] == f"EP {'2 -> 4' if phase == 'preparing' else '4 -> 2'}: {phase}"
        groups.held_phase = ""
        await cluster.ready("chat")


async def test_an_autoscaler_sets_the_size_and_the_spec_takes_it_back(
    cluster: Cluster, groups: Groups, start_operator: StartOperator, proxy: Proxy
) -> None:
    operator = await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")

    async def has(size: int) -> bool:
        return bool((await scale_object(cluster)).get("status", {}).get("replicas") == size)

    await until(lambda: has(2), "the size that there is", 60, lambda: cluster.service("chat"))
    child = await scale_object(cluster)
    assert child["spec"] == {"replicas": 2}
    assert (child["status"]["target"], child["status"]["unit"]) == (2, "expert")

    path = f"{SCALES.format(cluster.namespace)}/chat/scale"
    await cluster.merge(path, {"spec": {"replicas": 3}})
    await until(lambda: has(3), "the autoscaler's size", 60, lambda: cluster.service("chat"))
    await cluster.ready("chat")
    assert (await cluster.service("chat"))["spec"]["parallelism"]["expert"] == 2
    await operator.settled()
    before = len(proxy.writes)
    await operator.stop()
    again = await start_operator()
    await again.more_runs(0)
    await again.settled()
    assert proxy.writes[before:] == []
    assert len(groups.members) == 3

    await resize(cluster, 4)
    await until(lambda: has(4), "the spec's size", 60, lambda: cluster.service("chat"))
    assert (await scale_object(cluster))["spec"] == {"replicas": 4}
    # Beyond the bounds the largest size is taken, and reported as rounded.
    await cluster.merge(path, {"spec": {"replicas": 50}})
    await until(lambda: has(6), "the largest size", 60, lambda: cluster.service("chat"))
    rounded = {each["type"]: each for each in (await scale_object(cluster))["status"]["conditions"]}["Rounded"]
    assert (rounded["status"], rounded["message"]) == (
        "True",
        "spec.replicas: no group can have 50, so it is 6; possible for expert are 1, 2, 3, 4, 5, 6",
    )


async def test_a_horizontal_pod_autoscaler_finds_its_target(cluster: Cluster, start_operator: StartOperator) -> None:
    """Runs a real one, which needs no metrics to bring a size within its own bounds."""
    await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    target = {"apiVersion": "serving.starling.dev/v1alpha1", "kind": "ParallelismScale", "name": "chat"}
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}}
    body = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat"},
        "spec": {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 4, "metrics": [metric]},
    }
    await cluster.apply(body, "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers")

    async def has_grown() -> bool:
        return bool((await scale_object(cluster)).get("status", {}).get("replicas") == 3)

    await until(has_grown, "the autoscaler's smallest size", 60, lambda: scale_object(cluster))
    assert len(await identities(cluster)) == 3
    assert (await cluster.service("chat"))["spec"]["parallelism"]["expert"] == 2


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase == "committing" else pytest.mark.whole) for phase in PHASES]
)
async def test_killed_in_a_phase_the_next_operator_ends_it(
    cluster: Cluster, groups: Groups, start_operator: StartOperator, phase: str
) -> None:
    first = await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    before = await identities(cluster)
    groups.held_phase = phase
    await resize(cluster, 4)
    await in_phase(cluster, phase)
    first.kill()
    await first.ended()
    await cluster.delete(LEASE.format(cluster.namespace))
    groups.held_phase = ""
    await start_operator()
    await cluster.ready("chat")
    assert (await identities(cluster)).items() >= before.items()
    assert len({identifier for _, identifier, data in (await leader(cluster, groups)).received if data == 4}) == 1


@pytest.mark.timeout(900)
async def test_killed_after_each_write_of_a_change_the_next_run_ends_it(
    cluster: Cluster, groups: Groups, start_operator: StartOperator, proxy: Proxy, every: int
) -> None:
    """Grows and shrinks, killed some writes later each time, until neither change has as many writes."""
    operator = await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    await operator.settled()
    first, outlived, changes, count = await identities(cluster), 0, 0, 1 - every
    while outlived < 2:
        changes, count = changes + 1, count + every
        size = 4 if changes % 2 else 2
        before, victim = len(proxy.writes), operator
        proxy.after_write = lambda made, limit=before + count, victim=victim: victim.kill() if made >= limit else None
        await resize(cluster, size)
        outlived = outlived + 1 if await _outlives(cluster, victim, size) else 0
        proxy.after_write = lambda _: None
        if not outlived:
            # The process is dead: no need to wait until its Lease expires.
            await cluster.delete(LEASE.format(cluster.namespace))
            operator = await start_operator()
        await cluster.ready("chat")
        calls = (await leader(cluster, groups)).received
        made = dict.fromkeys(identifier for _, identifier, _ in calls)
        assert len(made) == changes + 1, f"killed after write {count}: {calls}"

        async def has_pods(size: int = size) -> bool:
            return len(await identities(cluster)) == size

        await until(has_pods, f"{size} pods")
        assert (await identities(cluster)).items() >= first.items()
    assert count > 7


async def _outlives(cluster: Cluster, victim: OperatorProcess, size: int) -> bool:
    """Returns whether the operator made the whole change with fewer writes."""

    async def is_over() -> bool:
        ready, sizes = await cluster.condition("chat", "Ready"), (await group_of(cluster))["effective"]
        return not victim.is_running or (ready["status"] == "True" and sizes["expert"] == size)

    await until(is_over, "the end of the change, or of the operator", 90)
    if victim.is_running:
        await victim.settled()
    return victim.is_running


@pytest.mark.parametrize("fault", ["lost_calls", "lost_answers"])
async def test_a_call_without_an_answer_is_sent_again_with_the_same_id(
    cluster: Cluster, groups: Groups, start_operator: StartOperator, fault: str
) -> None:
    await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    head = await leader(cluster, groups)
    setattr(head, fault, 2 if fault == "lost_calls" else 1)
    await resize(cluster, 4)
    await cluster.ready("chat")
    calls = [identifier for _, identifier, data in head.received if data == 4]
    assert len(set(calls)) == 1
    assert len(calls) >= (3 if fault == "lost_calls" else 1)


async def test_a_size_that_the_leader_refuses_is_reported(cluster: Cluster, groups: Groups, start_operator: StartOperator) -> None:
    operator = await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    head = await leader(cluster, groups)
    head.refuse = (400, "invalid_target", "data: the model has 3 experts, so at most 3 is possible, got 4")
    await resize(cluster, 4)

    async def is_stalled() -> bool:
        return bool((await cluster.condition("chat", "Stalled"))["status"] == "True")

    await until(is_stalled, "the refusal", 60, lambda: cluster.service("chat"))
    stalled = await cluster.condition("chat", "Stalled")
    assert stalled["reason"] == "ScalingFailed"
    assert "the model has 3 experts, so at most 3 is possible, got 4" in stalled["message"]
    assert (await cluster.condition("chat", "Available"))["status"] == "True"
    await operator.settled()
    assert len([each for each in head.received if each[2] == 4]) == 1
    assert len(await identities(cluster)) == 2
    head.refuse = None
    await resize(cluster, 3)
    await cluster.ready("chat")


@pytest.mark.parametrize("code", ["rank_dead", "operation_running", "not_leader"])
async def test_a_call_that_a_leader_refuses_for_now_is_sent_again(
    cluster: Cluster, groups: Groups, start_operator: StartOperator, code: str
) -> None:
    await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    head = await leader(cluster, groups)
    head.refuse = (409, code, "not now")
    await resize(cluster, 4)

    async def is_reported() -> bool:
        return "not now" in (await group_of(cluster)).get("operation", {}).get("error", "")

    await until(is_reported, "the refusal", 60, lambda: cluster.service("chat"))
    assert (await cluster.condition("chat", "Ready"))["reason"] == "Scaling"
    head.refuse = None
    await cluster.ready("chat")
    assert len({identifier for _, identifier, data in head.received if data == 4}) == 1


async def test_another_size_in_the_middle_cancels(cluster: Cluster, groups: Groups, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    groups.held_phase = "preparing"
    await resize(cluster, 4)
    await in_phase(cluster, "preparing")
    await resize(cluster, 2)
    await cluster.ready("chat")
    head = await leader(cluster, groups)
    assert head.received[-1][0] == "DELETE"
    assert (await group_of(cluster))["operation"]["phase"] == "cancelled"

    async def is_back() -> bool:
        return len(await identities(cluster)) == 2

    await until(is_back, "the pods that were not needed to end")


async def test_a_failure_is_reported_and_tried_again(cluster: Cluster, groups: Groups, start_operator: StartOperator) -> None:
    await start_operator(altered=["starling_operator.plan.elastic.next_step:FIRST_BACKOFF=4"])
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    groups.failures = 1
    await resize(cluster, 4)
    await in_phase(cluster, "failed")
    assert "no memory for the experts" in (await group_of(cluster))["operation"]["error"]
    await cluster.ready("chat")
    calls = [identifier for _, identifier, data in (await leader(cluster, groups)).received if data == 4]
    assert len(set(calls)) == 2
    assert (await group_of(cluster))["operation"]["attempt"] == 2


async def test_a_leader_that_lost_the_operation_gets_it_again(
    cluster: Cluster, groups: Groups, start_operator: StartOperator
) -> None:
    await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    groups.held_phase = "preparing"
    await resize(cluster, 4)
    await in_phase(cluster, "preparing")
    head = await leader(cluster, groups)
    head.restart()
    groups.held_phase = ""
    await cluster.ready("chat")
    calls = [identifier for _, identifier, data in head.received if data == 4]
    assert len(calls) >= 2 and len(set(calls)) == 1
    assert (await group_of(cluster))["effective"] == {"data": 4, "expert": 4}


async def test_a_lost_status_adopts_the_leaders_operation(cluster: Cluster, groups: Groups, start_operator: StartOperator) -> None:
    first = await start_operator()
    await cluster.apply(elastic(2))
    await cluster.ready("chat")
    groups.held_phase = "preparing"
    await resize(cluster, 4)
    await in_phase(cluster, "preparing")
    last = (await leader(cluster, groups)).received[-1]
    await first.stop()
    body = await cluster.service("chat")
    body.pop("status")
    await cluster.call("PUT", f"{SERVICES.format(cluster.namespace)}/chat/status", body)
    await start_operator()
    await in_phase(cluster, "preparing")
    assert (await group_of(cluster))["operation"]["id"] == last[1]
    groups.held_phase = ""
    await cluster.ready("chat")
    assert (await leader(cluster, groups)).received[-1] == last


async def test_removing_the_bounds_removes_the_parallelism_scale(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(elastic(1))
    await cluster.ready("chat")
    await cluster.edit("chat", {"parallelism": {"elastic": None}})

    async def is_gone() -> bool:
        return ("ParallelismScale", "chat") not in await cluster.children()

    await until(is_gone, "the ParallelismScale to go")
