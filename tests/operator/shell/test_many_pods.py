"""Three thousand pods of paper in one service, with a real API server and a running operator: its status stays small and calm."""

import itertools
import json
import time

import pytest

from tests.operator.shell.agents import Agent
from tests.operator.shell.cluster import PODS, SERVICES, Cluster, Manifest, manifest
from tests.operator.shell.conftest import StartOperator
from tests.operator.shell.kubelet import STRATEGIC
from tests.operator.shell.proxy import Proxy
from tests.waiting import until

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3000), pytest.mark.usefixtures("kubelet")]
GROUPS, NODES = 12, 250
SECONDS = 20.0
"""For so long one pod or another has news, many times a second."""
MOST_BYTES = 256 * 1024


@pytest.fixture
def admit() -> object:
    """Lets no agent start: pods have a node, and wait for their image."""

    def nobody(_: Manifest, __: Agent) -> Agent | None:
        return None

    return nobody


@pytest.fixture
def period() -> float:
    """A list of all pods is tens of megabytes."""
    return 3.0


async def test_a_status_of_three_thousand_pods_is_small_and_written_once_a_second(
    cluster: Cluster, start_operator: StartOperator, proxy: Proxy
) -> None:
    written: list[float] = []

    def note(_: int) -> None:
        if proxy.writes[-1].path.partition("?")[0] == f"{SERVICES.format(cluster.namespace)}/chat/status":
            written.append(time.monotonic())

    proxy.after_write = note
    operator = await start_operator()
    began = time.monotonic()
    await cluster.apply(manifest(replicas=GROUPS, parallelism={"tensor": NODES}))

    async def all_exist() -> bool:
        listed = await cluster.call("GET", PODS.format(cluster.namespace), limit="1")
        return listed["metadata"].get("remainingItemCount") == GROUPS * NODES - 1

    await until(all_exist, "all pods to be created", 2400)
    print(f"{GROUPS * NODES} pods after {time.monotonic() - began:.0f} s and {len(written)} writes of the status")
    await operator.settled()
    pods = (await cluster.call("GET", PODS.format(cluster.namespace), limit="40"))["items"]
    sizes, began, changes = [], time.monotonic(), 0
    written.clear()
    while time.monotonic() - began < SECONDS:
        pod = pods[changes % len(pods)]
        waiting = {"reason": "ImagePullBackOff", "message": f"pull number {changes}"}
        state = {"name": "agent", "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": {"waiting": waiting}}
        path = f"{PODS.format(cluster.namespace)}/{pod['metadata']['name']}/status"
        await cluster.call("PATCH", path, {"status": {"containerStatuses": [state]}}, STRATEGIC)
        changes += 1
        if changes % 10 == 0:
            sizes.append(len(json.dumps(await cluster.service("chat"), separators=(",", ":"))))
    gaps = [later - earlier for earlier, later in itertools.pairwise(written)]
    print(f"{changes} changes, {len(written)} writes of a status of {max(sizes)} bytes, at least {min(gaps):.2f} s apart")
    assert changes > 3 * SECONDS and written, "there was news enough"
    assert max(sizes) < MOST_BYTES
    assert len(written) <= SECONDS + 2
    assert (await cluster.service("chat"))["status"]["replicas"] == GROUPS
