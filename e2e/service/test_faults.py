"""What breaks, broken for real: the service heals, and what need not notice does not."""

import base64
import json

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, wait_until
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import OPERATOR_NAMESPACE, ClusterUnderTest

pytestmark = pytest.mark.timeout(300)


def answers(kubectl: Kubectl, chat: Watched, image: str) -> None:
    traffic = Traffic(kubectl, chat, image, streams=1)
    traffic.wait_for_more(3)
    assert failures(traffic.stop()) == []


def test_a_killed_rank_is_started_again_in_place(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service()
    chat.wait_ready()
    (pod,) = chat.pods()
    assert cluster.kill(pod["metadata"]["uid"], "starling_engine.core") == 1
    wait_until("it is not Ready", lambda: not chat.is_true("Ready"), 30, chat.explain)
    chat.wait_ready()
    (after,) = chat.pods()
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "the pod should have stayed"
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    answers(kubectl, chat, cluster.agent_image)


def test_a_killed_agent_leaves_the_other_group_serving(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service(replicas=2)
    chat.wait_ready(120)
    victim, other = (pod["metadata"] for pod in chat.pods())
    assert cluster.kill(victim["uid"], "starling agent") > 0
    wait_until("it is not Ready", lambda: not chat.is_true("Ready"), 30, chat.explain)
    assert chat.is_true("Available")
    chat.wait_ready(120)
    assert kubectl.get("pod", other["name"])["metadata"]["uid"] == other["uid"]
    assert sum(group["restarts"] for group in chat.now["status"]["groups"]) == 1
    answers(kubectl, chat, cluster.agent_image)


def test_a_killed_operator_is_replaced(service: MakeService, kubectl: Kubectl) -> None:
    chat = service()
    chat.wait_ready()
    uids = {pod["metadata"]["uid"] for pod in chat.pods()}
    operators = Kubectl(kubectl.program, kubectl.kubeconfig, OPERATOR_NAMESPACE)
    (lease,) = [one for one in operators.find("leases") if "starling" in one["metadata"]["name"]]
    holder = lease["spec"]["holderIdentity"]
    (name,) = [pod["metadata"]["name"] for pod in operators.find("pods") if pod["metadata"]["name"] in holder]
    operators("delete", "pod", name, "--grace-period=0", "--force")
    chat.patch(replicas=2)
    took = chat.wait_ready(60)
    print(f"operator killed, replicas 1 -> 2 to Ready: {took:.1f} s")
    assert uids < {pod["metadata"]["uid"] for pod in chat.pods()}, "pods that served should have stayed"


def test_a_node_whose_kubelet_dies_is_left(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service()
    chat.wait_ready()
    (pod,) = chat.pods()
    number = pod["spec"]["nodeName"].removeprefix("n")
    cluster.harness("kill-kubelet", number)
    try:

        def moved() -> bool:
            return any(one["metadata"]["uid"] != pod["metadata"]["uid"] and one["spec"].get("nodeName") for one in chat.pods())

        wait_until("the pod runs elsewhere", moved, 120, chat.explain)
        chat.wait_ready(120)
        answers(kubectl, chat, cluster.agent_image)
    finally:
        cluster.harness("start-kubelet", number)


def test_two_namespaces_do_not_meet(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    mine = service()
    other = Kubectl(kubectl.program, kubectl.kubeconfig, f"{kubectl.namespace}-other")
    other("create", "namespace", other.namespace)
    try:
        theirs = Watched(other, mine.name)
        theirs.apply()
        mine.wait_ready(120)
        theirs.wait_ready(120)
        theirs.patch(replicas=0)
        wait_until("their pods are gone", lambda: not theirs.pods(), 90, theirs.explain)
        assert mine.is_true("Ready")
        answers(kubectl, mine, cluster.agent_image)
    finally:
        other("delete", "namespace", other.namespace, "--wait=false")


def test_a_key_from_a_secret_is_asked_for(service: MakeService, kubectl: Kubectl) -> None:
    key = base64.b64encode(b"sesame\n").decode()
    kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "data": {"keys": key}})
    chat = service(endpoint={"apiKeySecret": {"name": "keys", "key": "keys"}})
    chat.wait_ready()
    (pod,) = chat.pods()
    ask = """
import sys, httpx
url, key, model = sys.argv[1:]
body = {"model": model, "prompt": "A", "max_tokens": 1}
print(httpx.post(url + "/completions", timeout=30, headers={"Authorization": "Bearer " + key}, json=body).status_code)
"""

    def status(given: str) -> str:
        out = kubectl("exec", pod["metadata"]["name"], "-c", "agent", "--", "python", "-c", ask, chat.url, given, chat.name)
        return out.strip()

    assert (status("sesame"), status("guess")) == ("200", "401")
    assert "sesame" not in json.dumps(chat.now)
