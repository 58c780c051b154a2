"""kill -9 after every single write: the next run converges to what an undisturbed one makes."""

import asyncio
import copy
from contextlib import suppress
from typing import Any

import pytest

from tests.operator.shell.cluster import SERVICES, Cluster, Manifest, manifest, until
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.proxy import Proxy
from tests.operator.shell.test_lease import LEASE

pytestmark = pytest.mark.usefixtures("kubelet")


@pytest.mark.timeout(400)
async def test_killed_after_each_write_the_next_run_converges(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy
) -> None:
    operator = await start_operator()
    await cluster.apply(manifest("whole", replicas=2))
    await cluster.ready("whole")
    await operator.settled()
    writes, wanted = len(proxy.writes), _shape(await cluster.children(), "whole")
    assert writes > 10
    for count in range(1, writes + 1):
        name = f"cut{count:03}"
        before, victim = len(proxy.writes), operator
        proxy.after_write = lambda made, limit=before + count, victim=victim: victim.kill() if made == limit else None
        await cluster.apply(manifest(name, replicas=2))
        with suppress(TimeoutError):
            # On a busy machine several changes may be seen at once, and the status is then written fewer times.
            async with asyncio.timeout(20):
                await victim.ended()
        proxy.after_write = lambda _: None
        await victim.stop()
        # It is known to be dead: nobody needs to wait until its Lease expires.
        await cluster.delete(LEASE.format(cluster.namespace))
        operator = await start_operator()
        await cluster.ready(name)
        await operator.settled()
        assert _shape(await cluster.children(), name) == wanted, f"killed after write {count} of {writes}"
        await _remove(cluster, name)


async def _remove(cluster: Cluster, name: str) -> None:
    await cluster.delete(f"{SERVICES.format(cluster.namespace)}/{name}")

    async def is_gone() -> bool:
        return not any(child.startswith(name) for _, child in await cluster.children())

    # The garbage collector looks for kinds that are new to it, as ours on a fresh API server, every 30 s.
    await until(is_gone, f"{name} to be gone", 45)


def _shape(children: dict[tuple[str, str], Manifest], service: str) -> list[Any]:
    """What a service's children are, without what is different in every run: names, ids, times, the token."""
    mine = {key: child for key, child in children.items() if key[1].startswith(service)}
    [revision] = {child["metadata"]["labels"].get("serving.starling.dev/revision", "") for child in mine.values()} - {""}
    shaped = []
    for (kind, name), child in sorted(mine.items()):
        content = {key: value for key, value in copy.deepcopy(child).items() if key not in ("metadata", "status")}
        if kind == "Secret":
            content["data"] = sorted(content["data"])
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
