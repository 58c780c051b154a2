"""ServiceMonitor, HTTPRoute and InferencePool: their CRDs come and go, and the operator runs on."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.kube.apiserver import started
from tests.operator.shell.cluster import Cluster, Manifest, Refused, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.crd import CRDS
from tests.operator.shell.optional_crds import GROUPS, crd
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")
HURRIED = ("starling_operator.watch.optional:PERIOD=0.5",)
AT_ONCE = (*HURRIED, "starling_operator.plan.gateway:HANDOVER_SECONDS=1")
ONCE = ("starling_operator.watch.optional:PERIOD=3600",)
ROUTE: dict[str, Manifest] = {"route": {"parentRefs": [{"name": "edge"}]}}
ROUTES = ("ServiceMonitor", "HTTPRoute")
POOL = ROUTE["route"] | {"backend": "InferencePool"}
AT_SERVICE, AT_POOL = ("Service", "chat", 80), ("InferencePool", "chat", None)


@pytest.fixture(scope="module")
def apiserver() -> Iterator[Path]:
    """One of their own: operators of other tests would use these kinds, too."""
    with started("--controllers") as kubeconfig:
        yield kubeconfig


async def install(cluster: Cluster, *kinds: str) -> None:
    """Installs the CRDs, and returns when the API server knows them."""
    for kind in kinds or ROUTES:
        await cluster.apply(crd(kind), CRDS)
    for kind in kinds or ROUTES:

        async def is_known(kind: str = kind) -> bool:
            return await found(cluster, kind) is not None

        await until(is_known, f"{kind} to be known")


async def remove(cluster: Cluster) -> None:
    """Removes the CRDs, and returns when the API server no longer knows them."""
    for kind in GROUPS:
        try:
            await cluster.delete(f"{CRDS}/{crd(kind)['metadata']['name']}")
        except Refused as refused:
            assert refused.status == 404
    for kind in GROUPS:

        async def is_unknown(kind: str = kind) -> bool:
            return await found(cluster, kind) is None

        await until(is_unknown, f"{kind} to be unknown")


async def found(cluster: Cluster, kind: str, name: str = "") -> Manifest | None:
    path = f"/apis/{GROUPS[kind]}/v1/namespaces/{cluster.namespace}/{kind.lower()}s"
    try:
        return await cluster.call("GET", f"{path}/{name}" if name else path)
    except Refused as refused:
        assert refused.status in (404, 429), "unknown, or just made known"
        return None


async def both(cluster: Cluster) -> None:
    async def are_there() -> bool:
        return all([await found(cluster, kind, "chat") is not None for kind in ROUTES])

    await until(are_there, "a ServiceMonitor and an HTTPRoute")


async def expect_missing(cluster: Cluster, kind: str = "HTTPRoute") -> None:
    async def is_reported() -> bool:
        stalled = await cluster.condition("chat", "Stalled")
        return stalled["reason"] == "ApplyFailed" and f"{kind} chat: the cluster has no {kind}" in stalled["message"]

    await until(is_reported, f"the service to report that {kind} is missing")


async def leads_to(cluster: Cluster, wanted: tuple[str, str, int | None]) -> None:
    async def check() -> bool:
        route = await found(cluster, "HTTPRoute", "chat")
        refs = [] if route is None else route["spec"]["rules"][0]["backendRefs"]
        return [(ref["kind"], ref["name"], ref.get("port")) for ref in refs] == [wanted]

    await until(check, f"the route to lead to {wanted}")


@pytest.fixture(autouse=True)
async def _clean(cluster: Cluster) -> AsyncIterator[None]:
    """Removes the CRDs after each test: the next one begins without them."""
    yield
    await remove(cluster)


async def test_kinds_that_are_installed_while_the_operator_runs_are_used(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator(altered=HURRIED)
    await cluster.apply(manifest(endpoint=ROUTE))
    await install(cluster)
    await both(cluster)
    await cluster.ready("chat")
    # What is deleted, or drifts, is put right.
    path = f"/apis/{GROUPS['ServiceMonitor']}/v1/namespaces/{cluster.namespace}/servicemonitors/chat"
    await cluster.delete(path)
    await both(cluster)
    await cluster.merge(path, {"spec": {"endpoints": []}})

    async def is_right() -> bool:
        return bool((await cluster.call("GET", path))["spec"]["endpoints"])

    await until(is_right, "the endpoints to be as before")
    # And they may go, and come again.
    await remove(cluster)
    await expect_missing(cluster)
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
    await expect_missing(cluster)
    service = await cluster.call("GET", f"/api/v1/namespaces/{cluster.namespace}/services/chat")
    assert service["spec"]["ports"][0]["port"] == 8123
    # Pods that serve HTTPS are scraped by HTTPS: the monitor changes too, and no spec asks for it.
    await cluster.edit("chat", {"endpoint": {"route": None, "tlsSecret": "tls"}})
    await cluster.ready("chat")
    assert "ServiceMonitor chat is refused" not in operator.log.read_text()
    assert await operator.metric("starling_operator_reconcile_errors_total") == 0


async def test_a_route_leads_to_a_pool_where_the_cluster_has_them(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy
) -> None:
    operator = await start_operator(altered=AT_ONCE)
    await install(cluster, "HTTPRoute")
    await cluster.apply(manifest(router={}, endpoint={"route": POOL}))
    await expect_missing(cluster, "InferencePool")
    await leads_to(cluster, AT_SERVICE)

    async def serves() -> bool:
        return bool((await cluster.condition("chat", "Available"))["status"] == "True")

    await until(serves, "all else to go on")
    await expect_missing(cluster, "InferencePool")
    await install(cluster, "InferencePool")
    await leads_to(cluster, AT_POOL)
    await cluster.ready("chat")
    pool, children = await found(cluster, "InferencePool", "chat"), await cluster.children()
    assert pool is not None and pool["spec"]["endpointPickerRef"] == {
        "group": "",
        "kind": "Service",
        "name": "chat-router",
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }
    (port,) = children["Service", "chat-router"]["spec"]["ports"]
    assert (port["port"], port["name"], port.get("appProtocol")) == (9002, "grpc-ext-proc", None)
    (pods,) = [
        peer["podSelector"]["matchLabels"] for peer in children["NetworkPolicy", "chat-router"]["spec"]["ingress"][1]["from"]
    ]
    assert pods == {"gateway.networking.k8s.io/gateway-name": "edge"}
    owned = [each["kind"] for each in pool["metadata"]["ownerReferences"]]
    assert owned == ["InferenceService"]

    await operator.settled()
    writes = len(proxy.writes)
    await cluster.edit("chat", {"rollout": {"maxSurge": 2}})  # wakes it
    await cluster.ready("chat")
    await operator.settled()
    assert not [write for write in proxy.writes[writes:] if "httproutes" in write.path or "inferencepools" in write.path]

    # Another operator that cannot list pools yet, nor says that there are none, leaves the route as it is.
    await operator.stop()
    writes, proxy.refuse, proxy.status = len(proxy.writes), "/inferencepools?", 503
    operator = await start_operator(altered=AT_ONCE)
    await cluster.edit("chat", {"rollout": {"maxSurge": 3}})
    await cluster.ready("chat")
    await operator.settled()
    proxy.refuse = ""
    await cluster.edit("chat", {"rollout": {"maxSurge": 4}})
    await cluster.ready("chat")
    await operator.settled()
    assert not [write for write in proxy.writes[writes:] if "httproutes" in write.path or "inferencepools" in write.path]
    assert operator.log.read_text().count("inferencepools cannot be listed") == 1, "said once"

    await cluster.edit("chat", {"endpoint": {"route": None}})

    async def are_gone() -> bool:
        left = [await found(cluster, kind, "chat") for kind in ("HTTPRoute", "InferencePool")]
        return left == [None, None] and ("Service", "chat-router") not in await cluster.children()

    await until(are_gone, "the route, its pool and their Service to be gone")
    await cluster.ready("chat")
    assert await operator.metric("starling_operator_reconcile_errors_total") == 0
