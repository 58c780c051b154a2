"""Tokens of services, derived from one key: no Secret of a service has to be read."""

import asyncio
import base64

import pytest
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from starling_operator.cluster.kube import Kube
from starling_operator.cluster.operator_key import NAME, operator_key

from tests.operator.shell.cluster import PODS, Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import Kubelet
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")
SECRETS = "/api/v1/namespaces/{}/secrets"


async def test_operators_that_find_no_key_agree_on_one(cluster: Cluster, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = Configuration()
    configuration.host = proxy.url
    kube = Kube(ApiClient(configuration), lambda: 10.0)
    get, all_have_read = kube.get, asyncio.Barrier(4)

    async def get_with_the_others(path: str) -> Manifest:
        try:
            return await get(path)
        finally:
            await all_have_read.wait()

    monkeypatch.setattr(kube, "get", get_with_the_others)
    found = await asyncio.gather(*(operator_key(kube, cluster.namespace) for _ in range(4)))
    await kube.close()
    stored = await cluster.call("GET", f"{SECRETS.format(cluster.namespace)}/{NAME}")
    assert {base64.b64decode(stored["data"]["key"])} == set(found) and len(found[0]) == 32
    assert stored["immutable"]
    assert len([request for request in proxy.writes if request.method == "POST"]) == 4, "each tried to create it"


async def test_a_key_that_anybody_could_guess_is_refused(cluster: Cluster, start_operator: StartOperator) -> None:
    key = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "data": {"key": ""}}
    await cluster.apply(key, SECRETS)
    operator = await start_operator(wait=False)

    async def is_reported() -> bool:
        return f"{NAME} has no key of at least 32 bytes" in (await operator.get("/readyz"))[1]

    await until(is_reported, f"/readyz to say it; see {operator.log}")
    await cluster.delete(f"{SECRETS.format(cluster.namespace)}/{NAME}")
    await until(operator.is_ready, "the operator to be ready with a key of its own")


async def test_a_deleted_secret_is_created_again_for_the_pod_that_waits_for_it(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    await start_operator(altered=("starling_operator.apply.applier:CREATE_AGAIN=0.5",))
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [before], [pod] = await _tokens(cluster), await cluster.pods()
    await cluster.delete(f"{SECRETS.format(cluster.namespace)}/{before['metadata']['name']}")
    # One without its role is replaced, in the same group.
    path = f"{PODS.format(cluster.namespace)}/{pod['metadata']['name']}"
    await cluster.merge(path, {"metadata": {"labels": {"serving.starling.dev/role": None}}})

    async def is_replaced() -> bool:
        uids = [other["metadata"]["uid"] for other in await cluster.pods()]
        return pod["metadata"]["uid"] not in uids and len(uids) == 1

    await until(is_replaced, "another pod", 60, cluster.pods)
    [after] = await until(lambda: _tokens(cluster), "the Secret")  # the status may still be that of the pod before
    await cluster.ready("chat")
    assert after["metadata"]["uid"] != before["metadata"]["uid"] and after["data"] == before["data"]


async def test_creating_an_existing_secret_again_reports_nothing(
    cluster: Cluster, start_operator: StartOperator, kubelet: Kubelet, proxy: Proxy
) -> None:
    """Refuses the Secret, as a full quota does before the API server says that there is one already."""
    kubelet.holding = True
    await start_operator(altered=("starling_operator.apply.applier:CREATE_AGAIN=0.2",))
    await cluster.apply(manifest())
    await until(lambda: _tokens(cluster), "the Secret")
    proxy.refuse = "/secrets"
    before = len(proxy.requests)

    async def is_refused() -> bool:
        return any("/secrets" in request.path for request in proxy.requests[before:])

    await until(is_refused, "another try")
    kubelet.holding, proxy.refuse = False, ""
    await cluster.ready("chat")
    events = await cluster.call("GET", f"/apis/events.k8s.io/v1/namespaces/{cluster.namespace}/events")
    assert "ApplyFailed" not in [event["reason"] for event in events["items"]]


async def test_with_another_key_services_serve_on_and_new_pods_have_the_new_token(
    cluster: Cluster, start_operator: StartOperator
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    [before] = await cluster.pods()
    await operator.stop()
    await cluster.delete(f"{SECRETS.format(cluster.namespace)}/{NAME}")
    await start_operator()

    async def is_reported() -> bool:
        reason: str = (await cluster.condition("chat", "Ready"))["reason"]
        return reason == "TokenRefused"

    await until(is_reported, "the refusal to be reported", 60, lambda: cluster.service("chat"))
    assert "1 of 1 groups serve" in (await cluster.condition("chat", "Stalled"))["message"]
    assert (await cluster.condition("chat", "Available"))["status"] == "True"
    assert [pod["metadata"]["uid"] for pod in await cluster.pods()] == [before["metadata"]["uid"]]
    await cluster.delete(f"{PODS.format(cluster.namespace)}/{before['metadata']['name']}")
    await cluster.ready("chat")


async def _tokens(cluster: Cluster) -> list[Manifest]:
    return [child for (kind, _), child in (await cluster.children()).items() if kind == "Secret"]
