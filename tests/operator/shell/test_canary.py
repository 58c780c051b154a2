"""A canary on a real API server, with an operator that is killed in the middle of it."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from starling_agent.contract.config import ENDPOINT_PORT
from starling_agent.contract.router_report import CanaryNotice, CanaryReport, RouterReport, ServiceNotice

from tests.operator.shell.cluster import Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

ADDRESS = f"127.{192 + os.getpid() % 60}.9.8"
SPEC = {"router": {"replicas": 1}, "rollout": {"canary": {"steps": [{"weight": 10, "seconds": 3600}], "compare": "tokens"}}}


class ReportingRouter:
    """Answers the operator's polls as a router does: at once with news. `differing` is what it has seen of any canary."""

    def __init__(self) -> None:
        self.weights: list[int | None] = []
        self.differing = 0
        self._versions = itertools.count(1)

    async def answer(self, request: web.Request) -> web.Response:
        canary = ServiceNotice.model_validate_json(await request.read()).canary
        weight = None if canary is None else canary.weight
        self.weights += [] if self.weights[-1:] == [weight] else [weight]
        report = None if canary is None else self._report(canary)
        answer = RouterReport(version=next(self._versions), incarnation="i", open=0, held=0, quiet_seconds=9, canary=report)
        await asyncio.sleep(0.2)
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    def _report(self, canary: CanaryNotice) -> CanaryReport:
        return CanaryReport(canary=canary.canary, attempt=canary.attempt, compared=9, differing=self.differing)


@pytest.fixture
async def router(kubelet: Kubelet) -> AsyncIterator[ReportingRouter]:
    kubelet.router_address = ADDRESS
    made, app = ReportingRouter(), web.Application()
    app.router.add_post("/router/report", made.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ADDRESS, ENDPOINT_PORT).start()
    yield made
    await runner.cleanup()


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
