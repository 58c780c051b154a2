"""Two operators never act at once, and one takes over from the other."""

import pytest

from tests.operator.shell.cluster import Cluster, manifest, until
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.process import OperatorProcess

pytestmark = pytest.mark.usefixtures("kubelet")
LEASE = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/starling-operator"


async def test_only_one_of_two_leads_and_a_killed_one_is_replaced(cluster: Cluster, start_operator: StartOperator) -> None:
    first = await start_operator()
    await until(lambda: _leads(first), "the first to lead")
    second = await start_operator()
    await cluster.apply(manifest())
    await cluster.ready("chat")
    assert not await _leads(second)
    assert await second.metric("starling_operator_api_writes_total") == 0
    first.kill()
    await cluster.apply(manifest("later"))
    await until(lambda: _leads(second), "the second to lead", 30)
    await cluster.ready("later")


async def test_a_stopped_operator_hands_over_at_once(cluster: Cluster, start_operator: StartOperator) -> None:
    first = await start_operator()
    await until(lambda: _leads(first), "the first to lead")
    second = await start_operator()
    holder = await _holder(cluster)
    assert await first.stop() == 0
    assert await _holder(cluster) != holder, "no need to wait for the Lease to expire"
    await until(lambda: _leads(second), "the second to lead", 20)


async def test_an_operator_whose_lease_is_taken_ends(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator()
    await until(lambda: _leads(operator), "it to lead")
    spec = {"holderIdentity": "another", "leaseDurationSeconds": 3600}
    await cluster.merge(LEASE.format(cluster.namespace), {"spec": spec})
    assert await operator.ended() == 1
    assert "LeaseLost" in operator.log.read_text()


async def _holder(cluster: Cluster) -> str:
    return str((await cluster.call("GET", LEASE.format(cluster.namespace)))["spec"]["holderIdentity"])


async def _leads(operator: OperatorProcess) -> bool:
    return await operator.metric("starling_operator_leader") == 1
