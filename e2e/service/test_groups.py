"""Groups of several pods: one model, served from every pod, by the engine cores of all."""

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(600)
ASK = """
import httpx, sys
body = {"model": sys.argv[1], "prompt": "A", "max_tokens": 2, "guided_regex": "[0-9]{40}"}
print(httpx.post("http://127.0.0.1:8000/v1/completions", timeout=30, json=body).json()["usage"]["completion_tokens"])
"""


def tokens_from(kubectl: Kubectl, chat: Watched, pod: str) -> str:
    """Through that pod's own endpoint."""
    return kubectl("exec", pod, "-c", "agent", "--", "python", "-c", ASK, chat.name).strip()


def test_two_pods_of_one_group_serve_and_one_goes_on_without_the_other(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service(parallelism={"data": 2})
    chat.wait_ready()
    (group,) = chat.now["status"]["groups"]
    assert (group["topology"], group["ranks"]) == ("TP1 PP1 DP2", 2)
    first, second = chat.pods()
    assert [tokens_from(kubectl, chat, pod["metadata"]["name"]) for pod in (first, second)] == ["2", "2"]

    name, uid = second["metadata"]["name"], second["metadata"]["uid"]
    since = chat.ready_since
    kubectl("delete", "pod", name, "--grace-period=0", "--force")
    chat.wait_lost(since)
    # What is sent before its kubelet has heard of it may still reach its engine core, and ends with it.
    wait_until("its processes are gone", lambda: not cluster.processes(uid, "starling"), 150, chat.explain)
    assert chat.is_true("Available") or tokens_from(kubectl, chat, first["metadata"]["name"]) == "2"
    traffic = Traffic(kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(5)
    took = chat.wait_ready()
    print(f"a pod of two killed, both serve again: {took:.1f} s later")
    assert failures(traffic.stop()) == []
    assert kubectl.get("pod", name)["metadata"]["uid"] != uid
    assert kubectl.get("pod", first["metadata"]["name"])["metadata"]["uid"] == first["metadata"]["uid"], "it knows nothing of it"
    assert [tokens_from(kubectl, chat, pod["metadata"]["name"]) for pod in chat.pods()] == ["2", "2"]


def test_a_killed_rank_on_another_pod_is_named_and_all_start_again(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service(parallelism={"pipeline": 2})
    chat.wait_ready()
    (group,) = chat.now["status"]["groups"]
    assert (group["topology"], group["ranks"]) == ("TP1 PP2 DP1", 2)
    pods = [pod["metadata"] for pod in chat.pods()]
    assert [tokens_from(kubectl, chat, pod["name"]) for pod in pods] == ["2", "2"]
    since = chat.ready_since
    assert cluster.kill(pods[1]["uid"], "starling_engine.worker") == 1
    chat.wait_said("rank 1 on ")
    chat.wait_lost(since)
    took = chat.wait_ready()
    print(f"a rank on another pod killed, both serve again: {took:.1f} s later")
    assert [pod["metadata"]["uid"] for pod in chat.pods()] == [pod["uid"] for pod in pods], "in place"

    since = chat.ready_since
    kubectl("delete", "pod", pods[1]["name"], "--grace-period=0", "--force")
    chat.wait_lost(since)
    took = chat.wait_ready()
    print(f"a pod of a split model killed, Ready again: {took:.1f} s later")
    assert [tokens_from(kubectl, chat, pod["name"]) for pod in pods] == ["2", "2"]


def test_an_edit_rolls_a_group_of_two_pods_over_without_a_failed_request(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service(parallelism={"data": 2})
    chat.wait_ready()
    before = {pod["metadata"]["uid"] for pod in chat.pods()}
    traffic = Traffic(kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(3)
    chat.patch(parallelism={"data": 1})
    chat.wait_ready()
    traffic.wait_for_more(3)
    assert failures(traffic.stop()) == []
    wait_until("the old pods are gone", lambda: not before & {pod["metadata"]["uid"] for pod in chat.pods()}, 180, chat.explain)
    assert (chat.now["status"]["topology"], len(chat.pods())) == ("TP1 PP1 DP1", 1)
