"""From apply to Ready to nothing left, on a real API server."""

import pytest

from tests.operator.shell.cluster import PODS, SERVICES, Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")


async def test_a_service_becomes_ready_when_its_agents_serve(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest(replicas=2))
    await cluster.ready("chat")
    body, children = await cluster.service("chat"), await cluster.children()
    assert body["status"]["replicas"] == body["status"]["readyReplicas"] == 2
    assert sorted(kind for kind, _ in children) == sorted(
        ["ConfigMap", "ControllerRevision", "NetworkPolicy", "PodDisruptionBudget", "Secret", "ServiceAccount"]
        + ["Service"] * 3
        + ["StatefulSet"] * 2
    )
    for child in children.values():
        [owner] = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (body["metadata"]["uid"], True, False)
        assert {field["manager"] for field in child["metadata"]["managedFields"]} >= {"starling-operator"}


async def test_nothing_of_the_operator_is_put_on_the_users_object(cluster: Cluster, start_operator: StartOperator) -> None:
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    metadata = (await cluster.service("chat"))["metadata"]
    assert "finalizers" not in metadata and "annotations" not in metadata
    for child in (await cluster.children()).values():
        assert "finalizers" not in child["metadata"] and "annotations" not in child["metadata"]


async def test_a_quiet_service_costs_no_request(
    cluster: Cluster, kubelet: Kubelet, start_operator: StartOperator, proxy: Proxy
) -> None:
    operator = await start_operator(altered=("starling_operator.watch.audit:PERIOD=3600",))
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await operator.settled()
    before, versions = len(proxy.requests), await _versions(cluster)
    runs = await operator.metric("starling_operator_reconcile_total")
    agent = kubelet.agent(f"{(await cluster.service('chat'))['status']['groups'][0]['name']}-0")
    for _ in range(3):
        # A report that changes nothing: the service is reconciled without a request.
        agent.update(open_streams=agent.report.open_streams + 1)
        await operator.more_runs(runs)
        runs = await operator.metric("starling_operator_reconcile_total")
    requests = [request for request in proxy.requests[before:] if "/leases/" not in request.path and not request.is_periodic]
    assert requests == []
    assert await _versions(cluster) == versions


async def test_an_operator_that_restarts_writes_nothing(cluster: Cluster, start_operator: StartOperator, proxy: Proxy) -> None:
    first = await start_operator()
    await cluster.apply(manifest(replicas=2))
    await cluster.ready("chat")
    await first.settled()
    await first.stop()
    before = len(proxy.writes)
    second = await start_operator()
    await second.more_runs(0)
    await second.settled()
    assert proxy.writes[before:] == []


async def test_deleting_a_service_leaves_nothing(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    await operator.stop()
    # Also when there is no operator.
    await cluster.delete(f"{SERVICES.format(cluster.namespace)}/chat")

    async def is_empty() -> bool:
        return not await cluster.children() and not await cluster.pods()

    await until(is_empty, "nothing to be left", 90, cluster.children)


async def _versions(cluster: Cluster) -> dict[tuple[str, str], str]:
    found = {key: child["metadata"]["resourceVersion"] for key, child in (await cluster.children()).items()}
    return found | {("InferenceService", "chat"): (await cluster.service("chat"))["metadata"]["resourceVersion"]}


@pytest.mark.parametrize("label", ["role", "group", "service"])
async def test_a_pod_that_lost_a_label_is_replaced(label: str, cluster: Cluster, start_operator: StartOperator) -> None:
    """Without a label no Service sends the pod requests, though it is ready, or no policy protects its ports."""
    await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [before] = await cluster.pods()
    path = f"{PODS.format(cluster.namespace)}/{before['metadata']['name']}"
    await cluster.merge(path, {"metadata": {"labels": {f"serving.starling.dev/{label}": None}}})

    async def is_replaced() -> bool:
        pods = [pod["metadata"] for pod in await cluster.pods()]
        return [pod["uid"] != before["metadata"]["uid"] for pod in pods] == [True]

    await until(is_replaced, "another pod", 60, cluster.pods)
    await cluster.ready("chat")
