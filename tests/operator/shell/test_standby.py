"""Sleep of an idle service on a real API server: its agents are told with their polls, and its pods stay."""

import time
from typing import Any

from starling_operator.plan.timestamps import rfc3339

from tests.operator.shell.cluster import SERVICES, Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.routers import ReportingRouter
from tests.operator.shell.routers import router as router
from tests.waiting import until

SPEC: dict[str, Any] = {"router": {"replicas": 1}, "scaling": {"idleSeconds": 3600, "standby": "asleep", "sleepLevel": 2}}


async def test_a_service_sleeps_and_a_request_wakes_the_same_pods(
    cluster: Cluster, start_operator: StartOperator, router: ReportingRouter, kubelet: Kubelet
) -> None:
    await start_operator()
    created = await cluster.apply(manifest(replicas=2, **SPEC))
    await cluster.ready("chat")
    before = {pod["metadata"]["uid"]: pod for pod in await served(cluster)}
    router.quiet = 4000.0

    async def goes_to_sleep() -> bool:
        if await all_are_told(kubelet, 2):
            return True
        await let_an_hour_pass(cluster)
        return False

    await until(goes_to_sleep, "the agents to be told to sleep", 90, lambda: cluster.service("chat"))
    await set_asleep(kubelet, before.values(), True)

    async def sleeps() -> bool:
        found = [await cluster.condition("chat", kind) for kind in ("Ready", "Reconciling", "Stalled")]
        said = [(each["status"], each["reason"]) for each in found]
        return said == [("False", "Asleep"), ("False", "Settled"), ("False", "NotStalled")] and router.phases[-1] == "Asleep"

    await until(sleeps, "the service to sleep, and its router to hear of it", 90, lambda: cluster.service("chat"))
    router.quiet = None
    await until(lambda: all_are_told(kubelet, 0), "the agents to be told to wake", 90, lambda: cluster.service("chat"))
    await set_asleep(kubelet, before.values(), False)
    await cluster.ready("chat")
    after = await cluster.service("chat")
    assert {pod["metadata"]["uid"] for pod in await served(cluster)} == before.keys(), "no pod is new"
    assert after["metadata"]["generation"] == created["metadata"]["generation"], "nobody wrote the spec"
    assert after["status"]["scaling"]["wanted"] == 2 and not after["status"]["scaling"].get("sleepLevel")


async def served(cluster: Cluster) -> list[dict[str, Any]]:
    return [pod for pod in await cluster.pods() if "serving.starling.dev/group" in pod["metadata"]["labels"]]


async def all_are_told(kubelet: Kubelet, level: int) -> bool:
    return [agent.sleep for agent in kubelet.agents.values()] == [level] * 2


async def set_asleep(kubelet: Kubelet, pods: Any, asleep: bool) -> None:
    """Does what agents and their kubelet do."""
    for pod in pods:
        kubelet.agent(pod["metadata"]["name"]).update(ready=not asleep, asleep=asleep)
        await kubelet.set_status(pod, ready=not asleep)


async def let_an_hour_pass(cluster: Cluster) -> None:
    """Writes an earlier time into the status, which the operator may be about to overwrite."""
    then = rfc3339(time.time() - 3600)
    conditions = (await cluster.service("chat"))["status"]["conditions"]
    for condition in conditions:
        condition["lastTransitionTime"] = then
    await cluster.merge(f"{SERVICES.format(cluster.namespace)}/chat/status", {"status": {"conditions": conditions}})
