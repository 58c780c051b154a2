"""Every state of a group, and the one step that follows."""

from dataclasses import replace
from typing import Any

import pytest
from starling_crds.v1alpha1.status import OperationStatus
from starling_operator.plan.elastic.next_step import ElasticDecision, backoff, next_step
from starling_operator.plan.group import Group
from starling_operator.plan.observed import LeaderRefusal

from tests.operator.plan.building import NOW
from tests.operator.plan.elastic.building import NAME, group_of, reported, stored, turn

UP, DOWN = f"{NAME}-4-1", f"{NAME}-2-1"


def down(phase: str, **more: Any) -> OperationStatus:
    return stored(phase, 4, 2, **more)


def leaving(phase: str, **more: Any) -> Any:
    return reported(phase, 4, 2, **more)


def said(step: ElasticDecision) -> tuple[int, str, str]:
    """Returns pods, the operation's phase and the call to the leader."""
    operation = step.operation.phase if step.operation is not None else "none"
    call = "" if step.call is None else "cancel" if step.call.data is None else f"to {step.call.data}"
    return step.nodes, operation, call


CASES: list[tuple[str, Group, dict[str, Any], tuple[int, str, str]]] = [
    # nothing to do
    ("settled, never resized", group_of(2, 2), {"desired": 2}, (2, "none", "")),
    ("settled after growing", group_of(4, 4, reported("done"), stored("done")), {"desired": 4}, (4, "done", "")),
    ("the leader is silent", group_of(2, None), {"desired": 4}, (2, "none", "")),
    ("the leader is silent in the middle", group_of(4, None, record=stored("preparing")), {"desired": 4}, (4, "preparing", "")),
    ("an older revision keeps its size", group_of(2, 2), {"desired": None}, (2, "none", "")),
    # growing, step by step
    ("pods come first", group_of(2, 2), {"desired": 4}, (4, "none", "")),
    ("then it is stored", group_of(4, 2), {"desired": 4}, (4, "waiting", "")),
    ("then the leader is called", group_of(4, 2, None, stored("waiting")), {"desired": 4}, (4, "waiting", "to 4")),
    ("it is followed", group_of(4, 2, reported("preparing"), stored("waiting")), {"desired": 4}, (4, "preparing", "")),
    ("to its commit", group_of(4, 2, reported("committing"), stored("preparing")), {"desired": 4}, (4, "committing", "")),
    ("new pods have to serve", group_of(4, 4, reported("done"), stored("committing")), {"desired": 4}, (4, "releasing", "")),
    (
        "when they do it is done",
        group_of(4, 4, reported("done"), stored("releasing")),
        {"desired": 4, "at_wanted_size": True},
        (4, "done", ""),
    ),
    ("done stays done", group_of(4, 4, reported("done"), stored("done")), {"desired": 4, "at_wanted_size": False}, (4, "done", "")),
    # the first size
    ("the first size is stored too", group_of(2, 0), {"desired": 2, "serves": False, "resizes": False}, (2, "waiting", "")),
    ("and called", group_of(2, 0, None, stored("waiting", 0, 2)), {"desired": 2, "serves": False}, (2, "waiting", "to 2")),
    ("more pods for a first size", group_of(2, 0), {"desired": 4, "serves": False}, (4, "none", "")),
    ("fewer pods for a first size", group_of(4, 0), {"desired": 2, "serves": False}, (2, "none", "")),
    # shrinking
    ("it is stored at once", group_of(4, 4), {"desired": 2}, (4, "waiting", "")),
    ("and called", group_of(4, 4, None, down("waiting")), {"desired": 2}, (4, "waiting", "to 2")),
    ("no pod goes while it prepares", group_of(4, 4, leaving("preparing"), down("waiting")), {"desired": 2}, (4, "preparing", "")),
    ("nor while it commits", group_of(4, 4, leaving("committing"), down("preparing")), {"desired": 2}, (4, "committing", "")),
    ("nor while it releases", group_of(4, 2, leaving("releasing"), down("committing")), {"desired": 2}, (4, "releasing", "")),
    ("then leavers go", group_of(4, 2, leaving("done"), down("releasing")), {"desired": 2}, (2, "releasing", "")),
    ("not with open streams", group_of(4, 2, leaving("done"), down("releasing"), streams=1), {"desired": 2}, (4, "releasing", "")),
    (
        "but after the drain limit",
        group_of(4, 2, leaving("done"), down("releasing", since=66), streams=1),
        {"desired": 2},
        (2, "releasing", ""),
    ),
    (
        "when they have gone it is done",
        group_of(2, 2, leaving("done"), down("releasing")),
        {"desired": 2, "at_wanted_size": True},
        (2, "done", ""),
    ),
    # another size is wanted meanwhile
    (
        "cancelled before it commits",
        group_of(4, 2, reported("preparing"), stored("preparing")),
        {"desired": 2},
        (4, "preparing", "cancel"),
    ),
    ("also if the leader never heard", group_of(4, 2, None, stored("waiting")), {"desired": 3}, (4, "waiting", "cancel")),
    ("too late", group_of(4, 2, reported("committing"), stored("preparing")), {"desired": 2}, (4, "committing", "")),
    ("too late to stop leavers", group_of(4, 2, leaving("releasing"), down("committing")), {"desired": 4}, (4, "releasing", "")),
    ("leavers go first", group_of(4, 2, leaving("done"), down("releasing"), streams=1), {"desired": 4}, (4, "releasing", "")),
    (
        "pods that no size needs go",
        group_of(4, 2, reported("cancelled"), stored("preparing")),
        {"desired": 2},
        (2, "cancelled", ""),
    ),
    ("another size from there", group_of(4, 2, reported("cancelled"), stored("cancelled")), {"desired": 4}, (4, "waiting", "")),
    ("its pods first", group_of(4, 2, reported("cancelled"), stored("cancelled")), {"desired": 3}, (3, "cancelled", "")),
    (
        "grown pods need not serve to shrink again",
        group_of(4, 4, reported("done"), stored("releasing")),
        {"desired": 2},
        (4, "waiting", ""),
    ),
    # failures
    ("a failure waits", group_of(4, 2, reported("failed", error="no"), stored("preparing")), {"desired": 4}, (4, "failed", "")),
    ("and is tried again", group_of(4, 2, reported("failed"), stored("failed", since=11)), {"desired": 4}, (4, "waiting", "")),
    (
        "until the budget is spent: its pods go",
        group_of(4, 2, reported("failed"), stored("failed", since=500, attempt=4)),
        {"desired": 4},
        (2, "failed", ""),
    ),
    (
        "and the window is over",
        group_of(4, 2, reported("failed"), stored("failed", since=601, attempt=4)),
        {"desired": 4},
        (4, "waiting", ""),
    ),
    ("another size needs no wait", group_of(2, 2, reported("failed"), stored("failed")), {"desired": 1}, (2, "waiting", "")),
    ("back to the old size", group_of(4, 2, reported("failed"), stored("failed")), {"desired": 2}, (2, "failed", "")),
    ("refused for good: its pods go", group_of(4, 2, None, stored("refused", error="no")), {"desired": 4}, (2, "refused", "")),
    # nobody to call
    ("lost capacity is no reason to shrink", group_of(4, 4), {"desired": 2, "serves": False}, (4, "none", "")),
    ("it is not its turn", group_of(2, 2), {"desired": 4, "resizes": False}, (2, "none", "")),
    ("a leader that failed", group_of(2, 0, phase="failed"), {"desired": 2}, (2, "none", "")),
    (
        "a leader that brings its engine back",
        group_of(4, 0, reported("done"), stored("done")),
        {"desired": 4, "serves": False},
        (4, "done", ""),
    ),
    # what was lost
    ("the status: adopted", group_of(4, 2, reported("preparing")), {"desired": 4}, (4, "preparing", "")),
    (
        "the status, another size: cancelled only when stored",
        group_of(4, 2, reported("preparing")),
        {"desired": 2},
        (4, "preparing", ""),
    ),
    ("the status, long ago", group_of(4, 4, reported("done")), {"desired": 4, "at_wanted_size": True}, (4, "done", "")),
    (
        "somebody else's operation",
        group_of(4, 2, reported("preparing", id="by-hand"), stored("waiting")),
        {"desired": 4},
        (4, "preparing", ""),
    ),
    (
        "somebody else's is over",
        group_of(4, 2, reported("done", 1, 2, id="by-hand"), stored("waiting")),
        {"desired": 4},
        (4, "waiting", "to 4"),
    ),
    ("the leader was restarted: called again", group_of(4, 0, None, stored("preparing")), {"desired": 4}, (4, "preparing", "to 4")),
    ("and after it was done", group_of(4, 0, None, stored("done")), {"desired": 4, "serves": False}, (4, "waiting", "")),
    ("an older revision cancels what waits", group_of(4, 2, None, stored("waiting")), {"desired": None}, (4, "waiting", "cancel")),
    ("its joiners go", group_of(4, 2, reported("cancelled"), stored("waiting")), {"desired": None}, (2, "cancelled", "")),
    (
        "an older revision ends what has its pods",
        group_of(4, 2, reported("preparing"), stored("preparing")),
        {"desired": None},
        (4, "preparing", ""),
    ),
    (
        "and keeps the size that it got",
        group_of(4, 4, reported("done"), stored("releasing")),
        {"desired": None},
        (4, "done", ""),
    ),
    ("without a size it begins none", group_of(2, 0), {"desired": None, "serves": False}, (2, "none", "")),
    # what others did to the StatefulSet
    ("pods of the serving epoch are put back", group_of(1, 4), {"desired": 4}, (4, "none", "")),
    ("pods of an operation are put back", group_of(3, 2, None, stored("waiting")), {"desired": 4}, (4, "waiting", "")),
    ("pods that nobody asked for go", group_of(6, 4), {"desired": 4}, (4, "none", "")),
]


@pytest.mark.parametrize(("group", "given", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_thing_at_a_time(group: Group, given: dict[str, Any], wanted: tuple[int, str, str]) -> None:
    step = next_step(group, turn(**given))
    assert said(step) == wanted
    # More pods, an operation's beginning and a call never come together.
    assert sum([step.nodes != group.nodes, step.begins_operation, step.call is not None]) <= 1


@pytest.mark.parametrize(
    ("code", "desired", "phase", "error"),
    [
        ("invalid_target", 4, "refused", "no"),
        ("operation_running", 4, "waiting", "no"),
        ("rank_dead", 4, "waiting", "no"),
        ("not_leader", 4, "waiting", "no"),
        ("http_503", 4, "waiting", "no"),
        ("unknown_operation", 2, "cancelled", ""),
        ("too_late", 2, "waiting", "no"),
    ],
)
def test_what_the_leader_refuses(code: str, desired: int, phase: str, error: str) -> None:
    group = group_of(4, 2, None, stored("waiting"))
    step = next_step(group, turn(desired, answers={UP: LeaderRefusal(code, "no")}))
    assert step.operation is not None
    assert (step.operation.phase, step.operation.error) == (phase, error)
    # An operation that has not ended is called again; pauses are the caller's.
    assert (step.call is not None) == (phase == "waiting")


def test_a_refusal_of_another_operation_is_nothing() -> None:
    group = group_of(4, 2, None, stored("waiting", number=2))
    step = next_step(group, turn(4, answers={UP: LeaderRefusal("invalid_target", "no")}))
    assert step.operation is not None
    assert (step.operation.phase, step.operation.id) == ("waiting", f"{NAME}-4-2")


def test_the_id_follows_from_what_is_stored() -> None:
    """Two operators that see the same make the same one; each later one is another."""
    first = next_step(group_of(4, 2), turn(4)).operation
    again = next_step(group_of(4, 2), turn(4)).operation
    assert first == again
    assert first is not None
    assert first.id == UP
    later = next_step(group_of(4, 2, reported("cancelled", number=7), stored("cancelled", number=7)), turn(4)).operation
    assert later is not None
    assert later.id == f"{NAME}-4-8"
    adopted = next_step(group_of(4, 4, reported("done", id="by-hand"), None), turn(2)).operation
    assert adopted is not None
    assert adopted.id == f"{NAME}-2-1"


def test_attempts_are_counted_for_one_target() -> None:
    failed = stored("failed", since=60, attempt=2)
    again = next_step(group_of(4, 2, reported("failed"), failed), turn(4)).operation
    other = next_step(group_of(3, 2, reported("failed"), failed), turn(3)).operation
    assert again is not None
    assert other is not None
    assert (again.attempt, again.id) == (3, f"{NAME}-4-2")
    assert (other.attempt, other.id) == (1, f"{NAME}-3-2")


def test_back_offs_grow_to_a_limit() -> None:
    assert [backoff(attempts) for attempts in (1, 2, 3, 6, 50)] == [10, 20, 40, 300, 300]


@pytest.mark.parametrize(
    ("group", "desired", "requeue_after"),
    [
        (group_of(4, 2, reported("failed"), stored("failed", since=4)), 4, 6.0),
        (group_of(4, 2, leaving("done"), down("releasing", since=5), streams=1), 2, 60.0),
        (group_of(4, 2, reported("failed"), stored("failed", since=100, attempt=4)), 4, 500.0),
        (group_of(4, 2, reported("preparing"), stored("preparing")), 4, None),
    ],
)
def test_what_ends_by_itself_is_looked_at_then(group: Group, desired: int, requeue_after: float | None) -> None:
    found = next_step(group, turn(desired)).requeue_after
    assert found == (None if requeue_after is None else pytest.approx(requeue_after))


def test_a_phase_keeps_its_time_and_progress_goes_in_steps() -> None:
    before = stored("preparing", since=30)
    step = next_step(group_of(4, 2, reported("preparing", progress=0.47, seconds={"waiting": 1.23456}), before), turn(4))
    assert step.operation is not None
    assert (step.operation.since, step.operation.progress) == (before.since, 40)
    assert (step.operation.seconds.waiting, step.operation.seconds.preparing) == (1.235, 0.0)
    after = next_step(group_of(4, 2, reported("committing"), before), turn(4)).operation
    assert after is not None
    assert after.since != before.since


def test_a_leaving_pod_that_does_not_answer_is_given_its_time() -> None:
    group = group_of(4, 2, leaving("done"), down("releasing"))
    silent = tuple(pod if pod.number < 2 else replace(pod, phase="Running", report=None) for pod in group.pods)
    waits = replace(group, pods=silent)
    assert said(next_step(waits, turn(2))) == (4, "releasing", "")
    assert said(next_step(waits, turn(2, now=NOW + 66))) == (2, "releasing", "")
