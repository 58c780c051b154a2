"""Progress of a group. Without it for too long a group is stalled, whatever it waits for."""

from typing import Any, Literal

import pytest
from starling_agent.contract.report import Phase, Progress
from starling_crds.v1alpha1.status import GroupNode, GroupStatus
from starling_operator.plan.failure import restarted_in_place
from starling_operator.plan.observed import Pod
from starling_operator.plan.progress import last_progress, progress_mark
from starling_operator.plan.status import summarised
from starling_operator.plan.timestamps import rfc3339

from tests.operator.plan.building import NOW, make_group, make_pod, make_report, pending
from tests.operator.plan.world import Member, World

BEFORE = NOW - 100


def known(*pods: Pod) -> GroupStatus:
    mark = progress_mark(pods)
    return GroupStatus(name="chat-aaaaaaa-0", revision="aaaaaaa", index=0, progressed_at=rfc3339(BEFORE), progress=mark)


def at(phase: Phase, done: int | None = None, unit: Literal["bytes", "tensors"] = "tensors") -> dict[str, Any]:
    progress = None if done is None else Progress(done=done, total=3 if unit == "tensors" else 10_000_000_000, unit=unit)
    return {"report": make_report(phase=phase, progress=progress, ready=False)}


@pytest.mark.parametrize(
    ("before", "pod", "is_progress"),
    [
        (pending(), at("starting"), True),
        (pending(), pending(), False),
        (pending(), pending(scheduled=True), True),
        (pending(scheduled=True), {"waiting": "ErrImagePull: x", "report": None}, False),
        ({"report": None}, at("loading", 1), True),
        (at("loading", 1), at("loading", 1), False),
        (at("loading", 0), at("loading", 1), True),
        (at("downloading", 3_100_000_000, "bytes"), at("downloading", 3_140_000_000, "bytes"), False),
        (at("downloading", 3_100_000_000, "bytes"), at("downloading", 3_200_000_000, "bytes"), True),
        (at("downloading", 9_000_000_000, "bytes"), at("loading", 0), True),
        (at("warming"), at("loading", 1), False),
        (at("loading", 1), at("failed"), False),
        (at("failed"), at("starting"), False),
    ],
)
def test_what_counts_as_progress(before: dict[str, Any], pod: dict[str, Any], is_progress: bool) -> None:
    assert last_progress(known(make_pod(**before)), [make_pod(**pod)], NOW) == (NOW if is_progress else BEFORE)


def test_one_pod_of_many_is_enough_and_one_that_is_lost_is_none() -> None:
    pods = [make_pod(number=number, **at("loading", 1)) for number in range(200)]
    assert last_progress(known(*pods), [*pods[:-1], make_pod(number=199, **at("loading", 2))], NOW) == NOW
    assert last_progress(known(*pods), pods[:-1], NOW) == BEFORE


@pytest.mark.parametrize("mark", ["", "far"])
def test_a_status_without_a_mark_is_no_progress(mark: str) -> None:
    before = known().model_copy(update={"progress": mark})
    assert last_progress(before, [make_pod(**at("warming"))], NOW) == BEFORE


def test_a_large_group_that_goes_on_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"parallelism": {"tensor": 130}}, node_slots=200)

    def loads(member: Member) -> None:
        member.stage = min(member.stage + 1, 2)

    monkeypatch.setattr(world, "_advance", loads)
    report = world._report

    def with_parts(member: Member) -> Any:
        done = int(world.now - NOW) if member.number == 129 else 0
        return report(member).model_copy(update={"progress": Progress(done=done, total=10_000, unit="tensors")})

    monkeypatch.setattr(world, "_report", with_parts)
    for _ in range(30):
        world.reconcile()
        world.tick(60)
    assert world.condition("Stalled")[0] == "False", world.message()
    assert len(world.status.groups[0].nodes) == 128


def test_a_large_group_hides_no_other() -> None:
    large, small, serving = (
        known().model_copy(
            update={
                "name": name,
                "ready": ready,
                "message": "m",
                "nodes": [GroupNode(pod=f"{name}-{number}", number=number) for number in range(pods)],
            }
        )
        for name, pods, ready in (("large", 130, False), ("small", 4, False), ("serving", 2, True))
    )
    shown = {group.name: (len(group.nodes), group.message) for group in summarised([large, small, serving])}
    assert shown == {"large": (124, "m"), "small": (4, "m"), "serving": (0, "")}


def test_a_pod_that_the_status_leaves_out_was_not_restarted() -> None:
    before = known().model_copy(update={"nodes": [GroupNode(pod="chat-aaaaaaa-0-0", number=0, uid="uid-chat-aaaaaaa-0-0")]})
    pods = [make_pod(number=number, restarts=1) for number in range(2)]
    group = make_group(pods=pods, nodes=2, previous=before)
    assert [restarted_in_place(group, pod) for pod in pods] == [True, False]


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
