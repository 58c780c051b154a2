"""ServiceMonitor and HTTPRoute: their CRDs come and go, and the operator runs on."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.operator.shell.cluster import Cluster, Manifest, Refused, manifest, until
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.crd import CRDS

pytestmark = pytest.mark.usefixtures("kubelet")
HURRIED = ("starling_operator.watch.optional:PERIOD=0.5",)
ONCE = ("starling_operator.watch.optional:PERIOD=3600",)
ROUTE = {"route": {"parentRefs": [{"name": "edge"}]}}
KINDS = {"ServiceMonitor": "monitoring.coreos.com", "HTTPRoute": "gateway.networking.k8s.io"}


def crd(kind: str) -> Manifest:
    group, singular = KINDS[kind], kind.lower()
    schema: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": f"{singular}s", "singular": singular},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


async def install(cluster: Cluster) -> None:
    """Installs the CRDs, and returns when the API server knows them."""
    for kind in KINDS:
        await cluster.apply(crd(kind), CRDS)
    for kind in KINDS:

        async def is_known(kind: str = kind) -> bool:
            return await found(cluster, kind) is not None

        await until(is_known, f"{kind} to be known")


async def remove(cluster: Cluster) -> None:
    """Removes the CRDs, and returns when the API server no longer knows them."""
    for kind in KINDS:
        try:
            await cluster.delete(f"{CRDS}/{crd(kind)['metadata']['name']}")
        except Refused as refused:
            assert refused.status == 404
    for kind in KINDS:

        async def is_unknown(kind: str = kind) -> bool:
            return await found(cluster, kind) is None

        await until(is_unknown, f"{kind} to be unknown")


async def found(cluster: Cluster, kind: str, name: str = "") -> Manifest | None:
    path = f"/apis/{KINDS[kind]}/v1/namespaces/{cluster.namespace}/{kind.lower()}s"
    try:
        return await cluster.call("GET", f"{path}/{name}" if name else path)
    except Refused as refused:
        assert refused.status in (404, 429), "unknown, or just made known"
        return None


async def both(cluster: Cluster) -> None:
    async def are_there() -> bool:
        return all([await found(cluster, kind, "chat") is not None for kind in KINDS])

    await until(are_there, "a ServiceMonitor and an HTTPRoute")


async def expect_missing_route(cluster: Cluster) -> None:
    async def is_reported() -> bool:
        stalled = await cluster.condition("chat", "Stalled")
        return stalled["reason"] == "ApplyFailed" and "HTTPRoute chat: the cluster has no HTTPRoute" in stalled["message"]

    await until(is_reported, "the service to report that the Gateway API is missing")


@pytest.fixture(autouse=True)
async def _clean(cluster: Cluster) -> AsyncIterator[None]:
    """Removes the CRDs after each test: the API server is shared."""
    yield
    await remove(cluster)


async def test_kinds_that_are_installed_while_the_operator_runs_are_used(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator(altered=HURRIED)
    await cluster.apply(manifest(endpoint=ROUTE))
    await install(cluster)
    await both(cluster)
    await cluster.ready("chat")
    # What is deleted, or drifts, is put right.
    path = f"/apis/{KINDS['ServiceMonitor']}/v1/namespaces/{cluster.namespace}/servicemonitors/chat"
    await cluster.delete(path)
    await both(cluster)
    await cluster.merge(path, {"spec": {"endpoints": []}})

    async def is_right() -> bool:
        return bool((await cluster.call("GET", path))["spec"]["endpoints"])

    await until(is_right, "the endpoints to be as before")
    # And they may go, and come again.
    await remove(cluster)
    await expect_missing_route(cluster)
    await install(cluster)
    await both(cluster)
    await cluster.ready("chat")
    # A route that is no longer wanted is deleted.
    await cluster.edit("chat", {"endpoint": {"route": None}})

    async def is_gone() -> bool:
        return await found(cluster, "HTTPRoute", "chat") is None

    await until(is_gone, "the HTTPRoute to be gone")
    assert (await operator.get("/healthz"))[0] == 200
    assert await operator.metric("starling_operator_reconcile_errors_total") == 0


async def test_a_kind_that_was_just_removed_holds_nothing_up(cluster: Cluster, start_operator: StartOperator) -> None:
    await install(cluster)
    operator = await start_operator(altered=ONCE)
    await cluster.apply(manifest(endpoint=ROUTE))
    await cluster.ready("chat")
    await both(cluster)
    await operator.settled()
    await remove(cluster)
    # The route leads to the Service's port: it has to be applied, and cannot be.
    await cluster.edit("chat", {"endpoint": {"port": 8123}})
    await expect_missing_route(cluster)
    service = await cluster.call("GET", f"/api/v1/namespaces/{cluster.namespace}/services/chat")
    assert service["spec"]["ports"][0]["port"] == 8123
    # Pods that serve HTTPS are scraped by HTTPS: the monitor changes too, and no spec asks for it.
    await cluster.edit("chat", {"endpoint": {"route": None, "tlsSecret": "tls"}})
    await cluster.ready("chat")
    assert "ServiceMonitor chat is refused" not in operator.log.read_text()
    assert await operator.metric("starling_operator_reconcile_errors_total") == 0
