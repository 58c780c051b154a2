"""One service from `kubectl apply` to `kubectl delete`, under traffic: each test takes it where the one before left it."""

from collections.abc import Iterator
from datetime import datetime

import pytest

from e2e.service.kubectl import Kubectl, condition, wait_until
from e2e.service.watched import MODEL, Traffic, Watched, failures
from e2e.under_test import ClusterUnderTest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def chat(shared_kubectl: Kubectl) -> Iterator[Watched]:
    """Applied, and not waited for."""
    watched = Watched(shared_kubectl, "chat")
    watched.apply()
    yield watched


def test_apply_to_first_token(chat: Watched, cluster: ClusterUnderTest) -> None:
    took = chat.wait_ready()
    print(f"apply to Ready: {took:.1f} s; {parts(chat)}")
    status = chat.now["status"]
    assert status["url"].startswith(f"http://{chat.name}.{chat.kubectl.namespace}.svc")
    assert (status["readyReplicas"], status["topology"]) == (1, "TP1 PP1 DP1")
    assert chat.now["metadata"].get("finalizers", []) == []
    traffic = Traffic(chat.kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(5)
    (pod,) = chat.pods()
    assert pod["status"]["qosClass"] == "Burstable", "who requests nothing is the first that a full node kills"
    assert [traffic.reaches(pod["status"]["podIP"], port) for port in (8000, 8001)] == [True, False], "policies keep strangers out"
    requests = traffic.stop()
    assert not failures(requests) and all(request["tokens"] > 0 for request in requests)


def parts(chat: Watched) -> str:
    """What the time to Ready was spent on, as Kubernetes' own times say (whole seconds)."""
    (pod,) = chat.pods()
    (container,) = pod["status"]["containerStatuses"]
    times = {
        "pod made": pod["metadata"]["creationTimestamp"],
        "container started": container["state"]["running"]["startedAt"],
        "pod ready": condition(pod, "Ready")["lastTransitionTime"],
        "service Ready": condition(chat.now, "Ready")["lastTransitionTime"],
    }
    began = datetime.fromisoformat(chat.now["metadata"]["creationTimestamp"])
    return ", ".join(f"{what} after {(datetime.fromisoformat(at) - began).total_seconds():.0f} s" for what, at in times.items())


def test_an_edit_rolls_over_without_a_failed_request(chat: Watched, cluster: ClusterUnderTest) -> None:
    chat.wait_ready()
    before = {pod["metadata"]["uid"] for pod in chat.pods()}
    traffic = Traffic(chat.kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(5)
    chat.patch(engine={"maxSequences": 8})
    chat.wait_ready()
    wait_until("the old pods are gone", lambda: not before & {pod["metadata"]["uid"] for pod in chat.pods()}, 180, chat.explain)
    traffic.wait_for_more(5)
    assert failures(traffic.stop()) == []


def test_scaling_under_traffic_fails_no_request(chat: Watched, cluster: ClusterUnderTest) -> None:
    chat.wait_ready()
    traffic = Traffic(chat.kubectl, chat, cluster.agent_image)
    traffic.wait_for_more(3)
    chat.kubectl("scale", "infsvc", chat.name, "--replicas=3")
    chat.wait_ready()
    assert chat.now["status"]["readyReplicas"] == 3
    traffic.wait_for_more(5)
    chat.kubectl("scale", "infsvc", chat.name, "--replicas=1")
    wait_until("one pod is left", lambda: len(chat.pods()) == 1, 180, chat.explain)
    chat.wait_ready()
    traffic.wait_for_more(5)
    assert failures(traffic.stop()) == []


def test_a_model_that_does_not_load_stops_the_rollout(chat: Watched, cluster: ClusterUnderTest) -> None:
    chat.wait_ready()
    traffic = Traffic(chat.kubectl, chat, cluster.agent_image)
    chat.patch(model={"source": "file:///opt/starling/models/nothing-here"})
    wait_until("the rollout is Stalled", lambda: chat.is_true("Stalled"), 180, chat.explain)
    assert "nothing-here" in condition(chat.now, "Stalled")["message"]
    assert chat.is_true("Available")
    traffic.wait_for_more(3)
    chat.patch(model={"source": MODEL})
    chat.wait_ready()
    assert failures(traffic.stop()) == []


def test_delete_leaves_nothing(chat: Watched) -> None:
    chat.wait_ready()
    chat.kubectl("delete", "infsvc", chat.name)
    kinds = "statefulsets,services,configmaps,secrets,serviceaccounts,poddisruptionbudgets,networkpolicies,controllerrevisions,pods"

    def left() -> list[str]:
        found = chat.kubectl("get", kinds, "-l", f"serving.starling.dev/service={chat.name}", "-o", "name")
        return found.split()

    wait_until("all children are gone", lambda: not left(), 180, lambda: "\n".join(left()))
