"""Each node is emptied in turn, as an administrator does it, while clients stream: nobody notices, and no node waits for ever."""

import time
from functools import partial

import pytest

from e2e.service.conftest import MakeService
from e2e.service.disturbances import try_to_evict
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(900)
ACCEPT = 20
"""Seconds for which a group of the first test at least accepts once it drains."""
DRAIN = 3 + 30 + 15
"""Seconds that a pod of these services may take to go: it accepts, drains, ends."""
RETRY = 5
"""Seconds between two tries of kubectl to evict a pod that its budget keeps."""


def drain(kubectl: Kubectl, services: tuple[Watched, ...], node: str, seconds: float) -> float:
    """Seconds that it took; fails when it takes longer than it may. Only pods of services: whoever asks them stays."""
    began = time.monotonic()
    options = ("--pod-selector=serving.starling.dev/service", "--delete-emptydir-data", f"--timeout={seconds:.0f}s")
    try:
        kubectl("drain", node, *options)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *(chat.explain() for chat in services)])) from None
    return time.monotonic() - began


def drained(kubectl: Kubectl, services: tuple[Watched, ...], node: str, seconds: float) -> None:
    """All that is on the node goes elsewhere, and the node takes pods again."""
    on_it = [pod for chat in services for pod in chat.pods() if pod["spec"]["nodeName"] == node]
    try:
        took = drain(kubectl, services, node, seconds)
        print(f"{len(on_it)} pods evicted from {node}: {took:.1f} s")
        for chat in services:
            chat.wait_ready()
            assert all(pod["spec"]["nodeName"] != node for pod in chat.pods())
    finally:
        kubectl("uncordon", node)


def test_a_pod_is_evicted_while_another_group_still_drains(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service(replicas=3, drain={"acceptSeconds": ACCEPT, "seconds": 30})
    chat.wait_ready()
    traffic = Traffic(kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(2)
    chat.patch(replicas=2)

    def draining() -> list[str]:
        return [pod["metadata"]["name"] for pod in chat.pods() if pod["metadata"].get("deletionTimestamp")]

    wait_until("one drains", lambda: len(draining()) == 1, 60, chat.explain)
    (leaving,) = draining()
    other = next(pod["metadata"]["name"] for pod in chat.pods() if pod["metadata"]["name"] != leaving)
    # The budget's status follows what pods do within a second or two.
    wait_until("another one may be evicted", lambda: try_to_evict(kubectl, other), ACCEPT / 2, chat.explain)
    assert leaving in draining(), "it was to be there still"
    wait_until("what was evicted is replaced", lambda: chat.is_true("Ready") and has_pods(chat, 2), 180, chat.explain)
    assert failures(traffic.stop()) == []


def has_pods(chat: Watched, count: int) -> bool:
    return len(chat.pods()) == count


@pytest.mark.whole  # eight minutes
def test_each_node_is_drained_and_nobody_notices(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    began = time.monotonic()
    services = service("gang", parallelism={"pipeline": 2}), service("pair", replicas=2)
    for chat in services:
        chat.wait_ready(300)
    start = time.monotonic() - began
    assert {pod["spec"]["nodeName"] for pod in services[1].pods()} == {"n1", "n2"}, "groups are spread over nodes"
    before = {pod["metadata"]["uid"] for chat in services for pod in chat.pods()}
    traffic = [Traffic(kubectl, chat, cluster.agent_image) for chat in services]
    for node in ("n1", "n2"):
        for each in traffic:
            each.wait_for_more(2)
        # The last one to go waits for at most a start and a drain of another group, and then drains itself.
        drained(kubectl, services, node, start + DRAIN + RETRY + DRAIN)
    for each in traffic:
        each.wait_for_more(2)
        requests = each.stop()
        print(f"{len(requests)} requests")
        assert failures(requests) == []
    after = {pod["metadata"]["uid"] for chat in services for pod in chat.pods()}
    assert not before & after
    for chat in services:
        assert sum(group.get("restarts", 0) for group in chat.now["status"]["groups"]) == 0
        wait_until("what was made ahead is gone", partial(has_pods, chat, 2), 60, chat.explain)
