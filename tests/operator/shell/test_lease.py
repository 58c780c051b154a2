"""Two operators never act at once, and one takes over from the other."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from starling_operator.cluster import lease as lease_module
from starling_operator.cluster.kube import Kube
from starling_operator.cluster.lease import Lease, run_in_thread

from tests.operator.shell.cluster import Cluster, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.process import OperatorProcess
from tests.waiting import until

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
    await until(lambda: _leads(second), "the second to lead", 90)
    await cluster.ready("later")


async def test_operators_of_two_classes_serve_their_own_services(cluster: Cluster, start_operator: StartOperator) -> None:
    plain, blue = await start_operator(), await start_operator("--class", "blue")
    await until(lambda: _leads(plain), "the one without a class to lead")
    await until(lambda: _leads(blue), "the other to lead beside it")
    await blue.stop()
    await cluster.apply(manifest("ours"))
    await cluster.apply(manifest("theirs", className="blue"))
    await cluster.ready("ours")
    assert not {name for _, name in await cluster.children() if name.startswith("theirs")}
    await plain.stop()
    await start_operator("--class", "blue")
    await cluster.ready("theirs")


async def test_a_stopped_operator_hands_over_at_once(cluster: Cluster, start_operator: StartOperator) -> None:
    first = await start_operator()
    await until(lambda: _leads(first), "the first to lead")
    second = await start_operator()
    holder = await _holder(cluster)
    assert await first.stop() == 0
    assert await _holder(cluster) != holder, "no need to wait for the Lease to expire"
    await until(lambda: _leads(second), "the second to lead")


async def test_a_lease_is_released_though_a_renewal_was_broken_off(cluster: Cluster, apiserver: Path) -> None:
    """The renewal arrived, so the holder knows only an old version."""
    settings = Configuration()
    await config.load_kube_config(config_file=str(apiserver), client_configuration=settings)
    kube, lease = Kube(ApiClient(settings), lambda: 10.0), Lease(cluster.namespace, "starling-operator", "this-one")
    try:
        await lease.acquire(kube)
        known = lease._held
        await lease._renew(kube)
        lease._held = known
        await lease.release(kube)
        assert await _holder(cluster) == ""
        # Another holder keeps it.
        await Lease(cluster.namespace, "starling-operator", "another").acquire(kube)
        lease._held = known
        await lease.release(kube)
        assert await _holder(cluster) == "another"
    finally:
        await kube.close()


async def test_a_lease_is_held_while_the_loop_is_busy(cluster: Cluster, apiserver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks the loop, as a decision on thousands of pods does."""
    monkeypatch.setattr(lease_module, "RENEW", 0.2)
    settings = Configuration()
    await config.load_kube_config(config_file=str(apiserver), client_configuration=settings)
    kube, lease = Kube(ApiClient(settings), lambda: 10.0), Lease(cluster.namespace, "starling-operator", "this-one")

    async def hold() -> None:
        thread_kube = Kube(ApiClient(settings), lambda: 10.0)
        try:
            await lease.hold(thread_kube, lambda: True)
        finally:
            await thread_kube.close()

    try:
        await lease.acquire(kube)
        first = lease._until
        holding = asyncio.create_task(run_in_thread(hold))
        while lease._until == first:  # noqa: ASYNC110 - another thread sends no events
            await asyncio.sleep(0.01)
        begun, end = lease._until, time.monotonic() + 30
        while lease._until == begun and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251 - this is the point
        assert lease.held and lease._until > begun
        holding.cancel()
        with suppress(asyncio.CancelledError):
            await holding
        await lease.release(kube)
        assert await _holder(cluster) == ""
    finally:
        await kube.close()


async def test_an_operator_whose_lease_is_taken_ends(cluster: Cluster, start_operator: StartOperator) -> None:
    operator = await start_operator()
    await until(lambda: _leads(operator), "it to lead")
    spec = {"holderIdentity": "another", "leaseDurationSeconds": 3600}
    await cluster.merge(LEASE.format(cluster.namespace), {"spec": spec})
    assert await operator.ended() == 1
    assert "LeaseLost" in operator.log.read_text()


async def _holder(cluster: Cluster) -> str:
    return str((await cluster.call("GET", LEASE.format(cluster.namespace)))["spec"].get("holderIdentity", ""))


async def _leads(operator: OperatorProcess) -> bool:
    return await operator.metric("starling_operator_leader") == 1
