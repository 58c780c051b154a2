"""The audit tells a dead watch from an API server that is away for a while."""

import asyncio
from typing import Any, cast

import pytest
from starling_operator.cluster.kinds import POD
from starling_operator.cluster.kube import Kube, KubeError
from starling_operator.plan.observed import Manifest
from starling_operator.watch import audit as module
from starling_operator.watch.audit import Audit
from starling_operator.watch.cache import Cache


class ApiServer:
    """Has one pod, of the version that it lists; `away`: it answers nothing. `audits` counts how often it was asked."""

    def __init__(self) -> None:
        self.version, self.away, self.audits = 9, False, 0

    async def get(self, path: str, query: Any, accept: str) -> Manifest:  # noqa: ARG002 - it has one pod only
        self.audits += 1
        if self.away:
            raise KubeError(0, "Unreachable", "connection refused")
        version = str(self.version)
        return {"metadata": {"resourceVersion": version}, "items": [{"metadata": {"uid": "a", "resourceVersion": version}}]}


def pod(version: int) -> Manifest:
    metadata = {"uid": "a", "resourceVersion": str(version), "namespace": "n", "name": "a"}
    return {"metadata": metadata | {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {}, "status": {}}


@pytest.mark.parametrize("shown", [True, False], ids=["the watch shows it late", "the watch shows nothing"])
async def test_an_api_server_that_is_away_is_no_dead_watch(monkeypatch: pytest.MonkeyPatch, shown: bool) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.05)
    server, cache = ApiServer(), Cache()
    audit = Audit(cache, [POD], [None], lambda _: None)
    cache.put(POD, pod(9))
    running = asyncio.create_task(audit.run(cast(Kube, server)))
    await audit.synced.wait()
    server.version = 10
    await said(audit, server, 1)
    server.away = True
    if shown:
        cache.put(POD, pod(10))
    assert not await said(audit, server, 3)
    server.away = False
    assert bool(await said(audit, server, 4)) is not shown
    running.cancel()


async def said(audit: Audit, server: ApiServer, more: int) -> list[str]:
    """Waits until so many more audits have begun, and returns what they say of watches."""
    wanted, found = server.audits + more, []
    while server.audits < wanted:
        await asyncio.sleep(0.005)
        found += [audit.behind] if audit.behind else []
    return found
