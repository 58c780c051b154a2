"""kill -9 after a write: the next run converges to what an undisturbed one makes."""

import copy
from typing import Any

import pytest

from tests.operator.shell.cluster import SERVICES, Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.process import OperatorProcess
from tests.operator.shell.proxy import Proxy
from tests.operator.shell.test_lease import LEASE
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("kubelet")


@pytest.mark.timeout(900)
async def test_killed_after_each_write_the_next_run_converges(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy, every: int
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest("steady", replicas=2))
    await cluster.ready("steady")
    await operator.settled()
    writes, wanted = len(proxy.writes), _shape(await cluster.children(), "steady")
    assert writes > 10
    for count in range(1, writes + 1, every):
        name = f"cut{count:03}"
        before, victim = len(proxy.writes), operator
        proxy.after_write = lambda made, limit=before + count, victim=victim: victim.kill() if made >= limit else None
        await cluster.apply(manifest(name, replicas=2))
        if await _outlives(cluster, victim, name):
            # How many statuses are written between depends on time; it had done all that there is to do before its last one.
            assert count > writes // 2
            break
        proxy.after_write = lambda _: None
        # The process is dead: no need to wait until its Lease expires.
        await cluster.delete(LEASE.format(cluster.namespace))
        operator = await start_operator()
        await cluster.ready(name)
        await operator.settled()
        assert _shape(await cluster.children(), name) == wanted, f"killed after write {count} of {writes}"
        # The garbage collector removes its children within half a minute.
        await cluster.delete(f"{SERVICES.format(cluster.namespace)}/{name}")


async def _outlives(cluster: Cluster, victim: OperatorProcess, name: str) -> bool:
    """Returns whether the operator made the service with fewer writes."""

    async def is_over() -> bool:
        return not victim.is_running or await cluster.is_ready(name)

    await until(is_over, f"{name} to be ready, or the end of the operator", 90, lambda: cluster.service(name))
    if victim.is_running:
        await victim.settled()
    return victim.is_running


def _shape(children: dict[tuple[str, str], Manifest], service: str) -> list[Any]:
    """Returns a service's children without what differs in every run: names, ids, times, the token and its volume."""
    mine = {key: child for key, child in children.items() if key[1].startswith(service)}
    [revision] = {child["metadata"]["labels"].get("serving.starling.dev/revision", "") for child in mine.values()} - {""}
    shaped = []
    for (kind, name), child in sorted(mine.items()):
        content = {key: value for key, value in copy.deepcopy(child).items() if key not in ("metadata", "status")}
        if kind == "Secret":
            content["data"], name = sorted(content["data"]), name[: -len("12345678")]
        if kind == "StatefulSet":
            content["spec"]["template"]["spec"]["volumes"].pop()
        for field in ("clusterIP", "clusterIPs"):
            if kind == "Service" and content["spec"].get(field) not in ("None", ["None"]):
                content["spec"].pop(field)
        shaped.append(_renamed([kind, name, child["metadata"]["labels"], content], service, revision))
    return shaped


def _renamed(value: Any, service: str, revision: str) -> Any:
    if isinstance(value, dict):
        return {_renamed(key, service, revision): _renamed(each, service, revision) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, service, revision) for each in value]
    return value.replace(revision, "REVISION").replace(service, "SERVICE") if isinstance(value, str) else value
