"""A canary on a real API server, with an operator that is killed in the middle of it."""

from typing import Any

from tests.operator.shell.cluster import Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.proxy import Proxy
from tests.operator.shell.routers import ReportingRouter
from tests.operator.shell.routers import router as router
from tests.waiting import until

SPEC = {"router": {"replicas": 1}, "rollout": {"canary": {"steps": [{"weight": 10, "seconds": 3600}], "compare": "tokens"}}}


async def test_a_canary_outlives_its_operator_and_is_rolled_back_to_the_pods_that_served(
    cluster: Cluster, start_operator: StartOperator, router: ReportingRouter, proxy: Proxy
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest(replicas=2, **SPEC))
    await cluster.ready("chat")
    before = {pod["metadata"]["uid"] for pod in await cluster.pods()}
    proxy.refuse = "/configmaps/chat-router"
    await cluster.edit("chat", {"engine": {"blockSize": 32}})

    async def has_requests() -> bool:
        written = (await cluster.service("chat"))["status"].get("canary", {})
        return router.weights[-1:] == [10] and written.get("weight") == 10

    await until(has_requests, "the canary's first step", 90, cluster.children_names)
    assert len(await cluster.pods()) == 4
    stalled = await cluster.condition("chat", "Stalled")
    assert stalled["status"] == "False", "routers are told without the ConfigMap, too"
    proxy.refuse = ""

    async def stored_notice() -> dict[str, Any] | None:
        return (await cluster.children()).get(("ConfigMap", "chat-router"))

    stored = await until(stored_notice, "the ConfigMap", 90)
    operator.kill()
    await operator.ended()
    assert '"weight":10' in stored["data"]["canary.json"], "a router that starts now finds it there"
    told = len(router.weights)
    await (await start_operator()).more_runs(0)
    assert router.weights[told:] == [], "the next operator says the same from its first word on"
    router.differing = 1

    async def is_gone() -> bool:
        children, pods = await cluster.children(), await cluster.pods()
        is_stored = ("ConfigMap", "chat-router") in children
        return {pod["metadata"]["uid"] for pod in pods} == before and router.weights[-1] is None and not is_stored

    await until(is_gone, "the canary's groups to go", 90, cluster.pods)
    body = await cluster.service("chat")
    assert body["status"]["canary"]["phase"] == "rolledBack" and router.weights == [None, 0, 10, 0, None]
    assert (await cluster.condition("chat", "Ready"))["reason"] == "CanaryRolledBack"
    assert "1 of 9 compared requests got other tokens" in (await cluster.condition("chat", "Stalled"))["message"]
