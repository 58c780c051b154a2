"""What breaks, broken for real: the service heals, and what need not notice does not."""

import signal

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, Manifest, condition, wait_until
from e2e.service.watched import Traffic, Watched, failures
from e2e.under_test import OPERATOR_NAMESPACE, ClusterUnderTest

pytestmark = pytest.mark.timeout(600)


def answers(kubectl: Kubectl, chat: Watched, image: str) -> None:
    traffic = Traffic(kubectl, chat, image, streams=1)
    traffic.wait_for_more(3)
    assert failures(traffic.stop()) == []


def test_a_killed_rank_is_started_again_in_place(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service()
    chat.wait_ready()
    (pod,) = chat.pods()
    since = chat.ready_since
    assert cluster.kill(pod["metadata"]["uid"], "starling_engine.core") == 1
    chat.wait_lost(since)
    chat.wait_ready()
    (after,) = chat.pods()
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "the pod should have stayed"
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    answers(kubectl, chat, cluster.agent_image)


@pytest.mark.whole  # test_groups has one over two pods
def test_a_killed_rank_of_a_split_model_is_named_and_all_start_again(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service(parallelism={"tensor": 2}, accelerators={"type": "cpu", "perNode": 2})
    chat.wait_ready()
    (group,) = chat.now["status"]["groups"]
    assert (group["topology"], group["ranks"]) == ("TP2 PP1 DP1", 2)
    (pod,) = chat.pods()
    since = chat.ready_since
    assert cluster.kill(pod["metadata"]["uid"], "/workers 1") == 1
    chat.wait_said("rank 1 (process")
    chat.wait_lost(since)
    chat.wait_ready()
    (after,) = chat.pods()
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "the pod should have stayed"
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    answers(kubectl, chat, cluster.agent_image)


def test_a_killed_agent_leaves_the_other_group_serving(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service(replicas=2)
    chat.wait_ready()
    victim, other = (pod["metadata"] for pod in chat.pods())
    since = chat.ready_since
    assert cluster.kill(victim["uid"], "starling agent") > 0
    chat.wait_lost(since)
    assert chat.is_true("Available")
    chat.wait_ready()
    assert kubectl.get("pod", other["name"])["metadata"]["uid"] == other["uid"]
    assert sum(group.get("restarts", 0) for group in chat.now["status"]["groups"]) == 1
    answers(kubectl, chat, cluster.agent_image)


def test_a_killed_operator_is_replaced(service: MakeService, kubectl: Kubectl) -> None:
    chat = service()
    chat.wait_ready()
    uids = {pod["metadata"]["uid"] for pod in chat.pods()}
    operators = Kubectl(kubectl.program, kubectl.kubeconfig, OPERATOR_NAMESPACE)
    operators("delete", "pod", acting(operators)["metadata"]["name"], "--grace-period=0", "--force")
    chat.patch(replicas=2)
    took = chat.wait_ready()
    print(f"operator killed, replicas 1 -> 2 to Ready: {took:.1f} s")
    assert uids < {pod["metadata"]["uid"] for pod in chat.pods()}, "pods that served should have stayed"


def acting(operators: Kubectl) -> Manifest:
    """The pod of the operator that holds the Lease; after a kill the Lease names a pod that is gone, until it runs out."""
    held: list[Manifest] = []

    def is_held() -> bool:
        holders = [lease["spec"]["holderIdentity"] for lease in operators.find("leases") if "starling" in lease["metadata"]["name"]]
        held[:] = [pod for pod in operators.find("pods") if any(pod["metadata"]["name"] in holder for holder in holders)]
        return bool(held)

    wait_until("an operator holds the Lease", is_held, 60)
    (pod,) = held
    return pod


def test_an_operator_that_hangs_is_replaced_and_its_kubelet_restarts_it(
    service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest
) -> None:
    chat = service()
    chat.wait_ready()
    operators = Kubectl(kubectl.program, kubectl.kubeconfig, OPERATOR_NAMESPACE)
    hung = acting(operators)["metadata"]
    assert cluster.kill(hung["uid"], "starling operator", signal.SIGSTOP) == 1
    chat.patch(replicas=2)
    took = chat.wait_ready()
    print(f"operator hung, replicas 1 -> 2 to Ready: {took:.1f} s")

    def restarted() -> bool:
        (status,) = operators.get("pod", hung["name"])["status"]["containerStatuses"]
        return bool(status["restartCount"] > 0 and status["ready"])

    wait_until("/healthz is silent, and the container is started anew", restarted, 180)


def test_a_node_that_is_emptied_lets_its_pods_drain(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service(replicas=2)
    chat.wait_ready()
    traffic = Traffic(kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(3)
    (leaving, staying) = chat.pods()
    emptied, going = leaving["spec"]["nodeName"], {leaving["metadata"]["uid"]}
    assert emptied != staying["spec"]["nodeName"], "groups are spread over nodes"
    kubectl("taint", "node", emptied, "maintenance=now:NoExecute")
    try:
        wait_until("its pods are gone", lambda: not going & {pod["metadata"]["uid"] for pod in chat.pods()}, 180, chat.explain)
        chat.wait_ready()
        traffic.wait_for_more(3)
        assert failures(traffic.stop()) == []
    finally:
        kubectl("taint", "node", emptied, "maintenance-")


def test_a_node_whose_kubelet_dies_is_left(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    chat = service()
    chat.wait_ready()
    (pod,) = chat.pods()
    number = pod["spec"]["nodeName"].removeprefix("n")
    cluster.harness("kill-kubelet", number)
    try:

        def moved() -> bool:
            return any(one["metadata"]["uid"] != pod["metadata"]["uid"] and one["spec"].get("nodeName") for one in chat.pods())

        left = wait_until("the pod runs elsewhere", moved, 120, chat.explain)
        took = chat.wait_ready()
        print(f"kubelet killed, pod elsewhere: {left:.1f} s, Ready {took:.1f} s later")
        answers(kubectl, chat, cluster.agent_image)
    finally:
        cluster.harness("start-kubelet", number)
        wait_until("the node is Ready again", lambda: is_ready(kubectl.get("node", f"n{number}")), 60)


def is_ready(node: Manifest) -> bool:
    return condition(node, "Ready").get("status") == "True"


def test_two_namespaces_do_not_meet(service: MakeService, kubectl: Kubectl, cluster: ClusterUnderTest) -> None:
    mine = service()
    other = Kubectl(kubectl.program, kubectl.kubeconfig, f"{kubectl.namespace}-other")
    other("create", "namespace", other.namespace)
    try:
        theirs = Watched(other, mine.name)
        theirs.apply()
        mine.wait_ready()
        theirs.wait_ready()
        theirs.patch(replicas=0)
        wait_until("their pods are gone", lambda: not theirs.pods(), 180, theirs.explain)
        assert mine.is_true("Ready")
        answers(kubectl, mine, cluster.agent_image)
    finally:
        other("delete", "namespace", other.namespace, "--wait=false")


def test_the_operator_may_read_no_secret_of_a_service(kubectl: Kubectl) -> None:
    operators = Kubectl(kubectl.program, kubectl.kubeconfig, OPERATOR_NAMESPACE)
    account = acting(operators)["spec"]["serviceAccountName"]

    def may(verb: str) -> str:
        user = f"--as=system:serviceaccount:{OPERATOR_NAMESPACE}:{account}"
        return kubectl("auth", "can-i", verb, "secrets", user, check=False).strip()

    verbs = ("get", "list", "watch", "update", "patch", "delete", "create")
    assert {verb: may(verb) for verb in verbs} == {verb: "yes" if verb == "create" else "no" for verb in verbs}
