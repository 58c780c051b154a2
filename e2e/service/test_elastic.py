"""A live group that changes its expert parallel size: under streams, without a restart, with and without an operator."""

import time
from typing import Any

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, wait_until
from e2e.service.test_faults import acting
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import OPERATOR_NAMESPACE, ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
MODEL = {"source": "file:///opt/starling/models/starling-random-moe", "dtype": "float32"}
ELASTIC = {"min": 1, "max": 4}


def elastic(service: MakeService, name: str) -> Watched:
    chat = service(name, model=MODEL, parallelism={"expert": 1, "elastic": ELASTIC})
    chat.wait_ready()
    return chat


def started(pod: Manifest) -> tuple[str, str, int]:
    (status,) = pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], status["state"]["running"]["startedAt"], status["restartCount"]


def settle(chat: Watched, size: int) -> float:
    """Seconds until the service is Ready with so many pods and ranks."""

    def settled() -> bool:
        (group,) = chat.now["status"]["groups"]
        return chat.is_true("Ready") and len(chat.pods()) == size and group["effective"]["expert"] == size

    return wait_until(f"it serves with {size}", settled, 180, chat.explain)


def texts(requests: list[Manifest]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for request in requests:
        found.setdefault(request["prompt"], set()).add(request["text"])
    return found


def test_it_grows_and_shrinks_under_streams_without_a_restart(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = elastic(service, "experts")
    traffic = Traffic(kubectl, chat, cluster.agent_image, streams=4)
    traffic.wait_for_more(8)
    stayed: dict[str, Any] = {pod["metadata"]["name"]: started(pod) for pod in chat.pods()}
    for size in (2, 4, 1):
        chat.patch(parallelism={"expert": size})
        took = settle(chat, size)
        (group,) = chat.now["status"]["groups"]
        seconds = group["operation"]["seconds"]
        print(f"EP -> {size} under streams, patch to Ready: {took:.1f} s; phases {seconds}")
        now = {pod["metadata"]["name"]: started(pod) for pod in chat.pods()}
        for name in stayed.keys() & now.keys():
            assert stayed[name] == now[name], "a pod that stays is not restarted"
        stayed = now
        assert group["topology"] == f"TP1 PP1 DP{size}" + (f" EP{size}" if size > 1 else "")
        traffic.wait_for_more(4)
    traffic.wait_for_more(20)
    requests = traffic.stop()
    assert failures(requests) == []
    assert {prompt: len(answers) for prompt, answers in texts(requests).items() if len(answers) > 1} == {}, (
        "the size changes no token"
    )


@pytest.mark.whole  # the operator's own tests kill it after each write
def test_an_operation_ends_right_whenever_the_operator_is_killed(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = elastic(service, "killed")
    traffic = Traffic(kubectl, chat, cluster.agent_image, streams=2)
    operators = Kubectl(kubectl.program, kubectl.kubeconfig, OPERATOR_NAMESPACE)
    for number, size in enumerate((2, 1, 2, 1)):
        chat.patch(parallelism={"expert": size})
        time.sleep(0.4 + 1.5 * number)
        operators("delete", "pod", acting(operators)["metadata"]["name"], "--grace-period=0", "--force")
        print(f"operator killed {0.4 + 1.5 * number:.1f} s after the patch, EP -> {size}: {settle(chat, size):.1f} s")
    assert failures(traffic.stop()) == []
