"""Progress of a group. Without it for too long a group is stalled, whatever it waits for."""

from typing import Any

import pytest
from starling_agent.contract.report import Progress
from starling_crds.v1alpha1.status import GroupNode, GroupStatus
from starling_operator.plan.progress import last_progress
from starling_operator.plan.timestamps import rfc3339

from tests.operator.plan.building import NOW, make_pod, make_report, pending
from tests.operator.plan.world import World

BEFORE = NOW - 100
LOADING = {"phase": "loading", "progress": Progress(done=1, total=3, unit="tensors"), "ready": False}


def known(**fields: Any) -> GroupStatus:
    node = GroupNode(pod="chat-aaaaaaa-0-0", number=0, **({"host": "node-0"} | fields))
    return GroupStatus(name="chat-aaaaaaa-0", revision="aaaaaaa", index=0, progressed_at=rfc3339(BEFORE), nodes=[node])


@pytest.mark.parametrize(
    ("node", "pod", "is_progress"),
    [
        ({"host": ""}, {}, True),
        ({"host": "", "phase": "Pending"}, pending(), False),
        ({"phase": "Pending"}, {"waiting": "ErrImagePull: x", "report": None}, False),
        ({"phase": "Running"}, {"report": make_report(**LOADING)}, True),
        ({"phase": "loading", "progress": "1/3 tensors"}, {"report": make_report(**LOADING)}, False),
        ({"phase": "loading", "progress": "0/3 tensors"}, {"report": make_report(**LOADING)}, True),
        ({"phase": "warming"}, {"report": make_report(**LOADING)}, False),
        ({"phase": "loading"}, {"report": make_report(phase="failed")}, False),
    ],
)
def test_what_counts_as_progress(node: dict[str, Any], pod: dict[str, Any], is_progress: bool) -> None:
    assert last_progress(known(**node), [make_pod(**pod)], NOW) == (NOW if is_progress else BEFORE)


def test_a_service_that_waits_for_a_node_is_stalled_after_the_deadline_and_may_yet_come() -> None:
    world = World({"rollout": {"progressDeadlineSeconds": 60}}, node_slots=0)
    for _ in range(5):
        world.reconcile()
        world.tick(10)
    assert world.condition("Reconciling")[0] == "True" and world.condition("Stalled")[0] == "False"
    for _ in range(4):
        world.reconcile()
        world.tick(10)
    assert world.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert "Unschedulable" in world.message() and "60 s" in world.message()
    world.node_slots = 1
    world.settle()
    assert world.condition("Ready") == ("True", "Serving") and world.condition("Stalled")[0] == "False"
