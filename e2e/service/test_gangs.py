"""Groups of several pods that want each other's nodes: they do not wait for each other for ever."""

import pytest

from e2e.service.conftest import MakeService
from e2e.service.kubectl import Kubectl, condition, wait_until
from e2e.service.watched import Watched

pytestmark = pytest.mark.timeout(600)
TAINT = "only"
MORE_THAN_HALF = {"requests": {"cpu": "1100m"}}
"""A share of a node with two cores of which one such pod fits it."""


def template(node: str) -> dict[str, object]:
    """Pods that `node` alone takes while each node has a taint of its own."""
    only = {"key": TAINT, "operator": "Equal", "value": node, "effect": "NoSchedule"}
    return {"spec": {"tolerations": [only], "containers": [{"name": "agent", "resources": MORE_THAN_HALF}]}}


def placed(chat: Watched) -> list[str]:
    return [pod["spec"]["nodeName"] for pod in chat.pods() if pod["spec"].get("nodeName")]


def test_two_services_that_hold_half_of_each_other_s_nodes_both_come(service: MakeService, kubectl: Kubectl) -> None:
    for node in ("n1", "n2"):
        kubectl("taint", "node", node, f"{TAINT}={node}:NoSchedule")
    try:
        gangs = [service(f"on-{node}", parallelism={"pipeline": 2}, template=template(node)) for node in ("n1", "n2")]
        wait_until("each has a node", lambda: [placed(gang) for gang in gangs] == [["n1"], ["n2"]], 60, gangs[0].explain)
    finally:
        for node in ("n1", "n2"):
            kubectl("taint", "node", node, f"{TAINT}-")

    def ready() -> list[Watched]:
        return [gang for gang in gangs if gang.is_true("Ready")]

    took = wait_until("one of them has both", lambda: bool(ready()), 240, lambda: "\n".join(gang.explain() for gang in gangs))
    print(f"two gangs that held a node each, first Ready: {took:.1f} s")
    (first,) = ready()
    (second,) = [gang for gang in gangs if gang is not first]
    wait_until("the other says why not", lambda: condition(second.now, "Ready")["reason"] == "Unschedulable", 60, second.explain)
    kubectl("delete", "infsvc", first.name)
    second.wait_ready()
